/* Lays every block that a framework allocates for a tensor in front of a page that nobody may touch.
 *
 * Preloaded into a process (LD_PRELOAD), it replaces posix_memalign, by which torch, ONNX Runtime and XLA allocate
 * tensors on a CPU, while guard_pages_on(1) holds. A block lies in pages of its own, between
 * inaccessible ones, and ends at the second or less than its alignment before it. The pages are filled with a NaN of a
 * known payload, so that a result shows when memory was read that nobody wrote. A byte that was changed beside a block is
 * counted when the block is freed. Freed pages are filled again and used again, the oldest first. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE 4096UL
#define REGION (1UL << 32) /* At most so much memory, in pages that are used and guards. */
#define FILL 0x7fe1b2c3u   /* A quiet NaN in float32. */
#define SIZES 24           /* Slots of 1, 2, 4, ... pages. */
#define WAITING 64         /* So many freed slots of a size wait before the oldest is used again. */

struct slot { char *data; size_t pages, bytes; struct slot *next; };

static char *region;
static struct slot **slots; /* By the page in which a slot's block begins. */
static size_t used = 1;     /* Pages; the first is a guard. */
static struct slot *oldest[SIZES], *newest[SIZES];
static size_t freed[SIZES];
static atomic_int on, locked;
static atomic_size_t broken;

static void lock(void) { while (atomic_exchange(&locked, 1)) {} }
static void unlock(void) { atomic_store(&locked, 0); }

void guard_pages_on(int now) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (region == NULL) {
        char *mapped = mmap(NULL, REGION, PROT_NONE, flags, -1, 0);
        slots = mmap(NULL, REGION / PAGE * sizeof *slots, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (mapped == MAP_FAILED || slots == MAP_FAILED) abort();
        region = mapped;
    }
    atomic_store(&on, now);
}

/* Number of blocks that were freed with a changed byte beside them. */
size_t guard_pages_broken(void) { return atomic_load(&broken); }

static void fill(struct slot *slot) {
    uint32_t *word = (uint32_t *)slot->data, *end = (uint32_t *)(slot->data + slot->pages * PAGE);
    while (word < end) *word++ = FILL;
}

static struct slot *take(int size) {
    struct slot *slot = NULL;
    lock();
    if (freed[size] > WAITING) {
        slot = oldest[size];
        oldest[size] = slot->next, freed[size]--;
    } else if (used + (1UL << size) + 1 <= REGION / PAGE) {
        slot = malloc(sizeof *slot);
        slot->pages = 1UL << size, slot->data = region + used * PAGE;
        used += slot->pages + 1; /* The page behind stays inaccessible. */
        if (mprotect(slot->data, slot->pages * PAGE, PROT_READ | PROT_WRITE)) abort();
        fill(slot);
    }
    unlock();
    return slot;
}

static void *guarded(size_t alignment, size_t bytes) {
    if (bytes == 0) bytes = 1;
    if (alignment < 16) alignment = 16;
    int size = 0;
    while (size < SIZES && (PAGE << size) < bytes) size++;
    if (alignment > PAGE || size == SIZES) return NULL;
    struct slot *slot = take(size);
    if (slot == NULL) return NULL;
    slot->bytes = bytes;
    char *block = (char *)(((uintptr_t)slot->data + slot->pages * PAGE - bytes) & ~(uintptr_t)(alignment - 1));
    slots[(size_t)(block - region) / PAGE] = slot;
    return block;
}

static int is_guarded(const void *block) {
    return region != NULL && (const char *)block >= region && (const char *)block < region + REGION;
}

static void release(char *block) {
    struct slot *slot = slots[(size_t)(block - region) / PAGE];
    const uint32_t fill_word = FILL;
    const char *end = slot->data + slot->pages * PAGE;
    int changed = 0;
    for (const uint32_t *at = (uint32_t *)slot->data; at < (uint32_t *)block; at++) changed |= *at != FILL;
    for (const char *at = block + slot->bytes; at < end; at++)
        changed |= *at != ((const char *)&fill_word)[(uintptr_t)at & 3];
    if (changed) atomic_fetch_add(&broken, 1);
    fill(slot);
    int size = __builtin_ctzl(slot->pages);
    lock();
    slot->next = NULL;
    if (freed[size]++) newest[size]->next = slot;
    else oldest[size] = slot;
    newest[size] = slot;
    unlock();
}

void free(void *block) {
    static void (*next)(void *);
    if (is_guarded(block)) {
        release(block);
        return;
    }
    if (!next) next = (void (*)(void *))dlsym(RTLD_NEXT, "free");
    next(block);
}

void *realloc(void *block, size_t bytes) {
    static void *(*next)(void *, size_t);
    if (!next) next = (void *(*)(void *, size_t))dlsym(RTLD_NEXT, "realloc");
    if (!is_guarded(block)) return next(block, bytes);
    size_t held = slots[(size_t)((char *)block - region) / PAGE]->bytes;
    void *moved = malloc(bytes);
    if (moved) {
        memcpy(moved, block, held < bytes ? held : bytes);
        release(block);
    }
    return moved;
}

int posix_memalign(void **result, size_t alignment, size_t bytes) {
    static int (*next)(void **, size_t, size_t);
    if (atomic_load(&on)) {
        *result = guarded(alignment, bytes);
        return *result ? 0 : ENOMEM;
    }
    if (!next) next = (int (*)(void **, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
    return next(result, alignment, bytes);
}
