#!/bin/sh
echo "program $RANK of $WORLD_SIZE: $2" > "$1/program-$RANK"
exit "${EXIT_WITH:-0}"
