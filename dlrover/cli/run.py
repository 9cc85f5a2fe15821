"""
`dlrover-run`: read the command line, check it, run the job. The first line of defence against slow starts:
import little.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from dlrover.cli.console import say, say_block
from dlrover.host.standard_streams import open_standard_descriptors
from dlrover.protocol.errors import ConfigError, DLRoverError

EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    open_standard_descriptors()
    arguments = list(sys.argv[1:] if argv is None else argv)
    from dlrover.cli.options.parser import parse
    from dlrover.cli.options.settings import effective_values, read_settings

    try:
        if not sys.platform.startswith("linux"):
            raise ConfigError(f"dlrover-run needs Linux (kernel 5.4 or newer); this is {sys.platform}.")
        parsed = parse(arguments, os.environ)
        immediate = parsed.immediate
        if immediate == "--check-env":
            from dlrover.cli.launch.check_env import print_table

            return print_table()
        if immediate:
            from dlrover.cli.options.help_page import describe_all, describe_common

            print(describe_all() if immediate == "--help-all" else describe_common(), end="")
            return 0
        if parsed.text("platform") == "ray":
            from dlrover.cli.ray.command import main as run_on_ray
            from dlrover.cli.ray.launch_options import as_ray_run

            return run_on_ray(as_ray_run(parsed, os.environ))
        parsed, settings = read_settings(arguments, os.environ)
        if settings.environment.log_level in ("INFO", "DEBUG"):
            import logging
            from importlib.metadata import version

            logging.basicConfig(
                stream=sys.stderr, level=settings.environment.log_level, format="dlrover-run: %(levelname)s %(message)s"
            )
            logging.getLogger(__name__).info("version=%s %s", version("dlrover"), effective_values(parsed))
        for note in settings.notes:
            say(note)
        from dlrover.cli.launch.launcher import launch

        return launch(settings, os.environ)
    except DLRoverError as error:
        say_block(f"dlrover-run: error: {error}\n")
        return EXIT_USAGE if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130  # before anything was started; afterwards the launcher handles it


if __name__ == "__main__":
    sys.exit(main())
