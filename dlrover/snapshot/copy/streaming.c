/*
Copying past the cache: stores that do not first read the line they overwrite. `streaming.py` says why, and loads what the
package's build makes of this file. It calls nothing but the C library's `memcpy`, and no Python.
*/
#include <emmintrin.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#define LINE_BYTES 64
#define AHEAD_BYTES 512 /* the memory answers after about so many bytes of copying */

typedef struct {
    uint64_t target, source, num_bytes;
} Block;

/* Whole lines to an aligned place, at least one. */
static void stream_lines(char *target, const char *source, uint64_t num_bytes)
{
    for (const char *end = source + num_bytes; source != end; source += LINE_BYTES, target += LINE_BYTES) {
        _mm_prefetch(source + AHEAD_BYTES, _MM_HINT_NTA); /* past the end of the block it does nothing */
        __m128i first = _mm_loadu_si128((const __m128i *)source);
        __m128i second = _mm_loadu_si128((const __m128i *)(source + 16));
        __m128i third = _mm_loadu_si128((const __m128i *)(source + 32));
        __m128i fourth = _mm_loadu_si128((const __m128i *)(source + 48));
        _mm_stream_si128((__m128i *)target, first);
        _mm_stream_si128((__m128i *)(target + 16), second);
        _mm_stream_si128((__m128i *)(target + 32), third);
        _mm_stream_si128((__m128i *)(target + 48), fourth);
    }
}

/*
Copy blocks until none is left, and return how many this call has copied. Threads that share the blocks share `next` too: the
number of the first block that no thread has taken.
*/
uint64_t dlrover_stream_blocks(const Block *blocks, uint64_t num_blocks, _Atomic uint64_t *next)
{
    uint64_t num_copied = 0, number;
    while ((number = atomic_fetch_add(next, 1)) < num_blocks) {
        const Block *block = &blocks[number];
        char *target = (char *)(uintptr_t)block->target;
        const char *source = (const char *)(uintptr_t)block->source;
        if ((block->target | block->num_bytes) % LINE_BYTES == 0)
            stream_lines(target, source, block->num_bytes);
        else /* small, and through the cache */
            memcpy(target, source, block->num_bytes);
        num_copied++;
    }
    _mm_sfence(); /* what the caller writes next (the state word) is seen after all of this */
    return num_copied;
}
