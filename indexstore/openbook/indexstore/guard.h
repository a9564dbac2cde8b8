/*
 * A file cut short under its map: the page that is no longer there reads as zeros.
 *
 * Touching a mapped page past the end of its file, or one the disk cannot read, is SIGBUS, which
 * ends the process. The handler here puts an anonymous page of zeros in its place, for addresses
 * inside a range that was added, and notes it; every other SIGBUS goes where it went before. What
 * was computed from the zeros is wrong: whoever reads a map asks ob_guard_is_hit before believing.
 *
 * A slot is written by the thread that holds the caller's lock, and read by the handler on any
 * thread: `end` is stored last and cleared first, so that a half-written slot covers nothing.
 */
#ifndef OB_GUARD_H
#define OB_GUARD_H

#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MAP_ANONYMOUS
#define MAP_ANONYMOUS MAP_ANON
#endif

enum { OB_GUARD_SLOTS = 16384 }; /* ranges at once; one per file that is mapped */

typedef struct {
    _Atomic uintptr_t start;
    _Atomic uintptr_t end; /* 0: the slot is free */
    atomic_int is_hit;
} ObGuardSlot;

static ObGuardSlot ob_guard_slots[OB_GUARD_SLOTS];
static atomic_int ob_guard_used; /* slots from here on were never used */
static atomic_int ob_guard_hits; /* pages replaced since the process began */
static atomic_int ob_guard_passed; /* signals that were not ours */
static struct sigaction ob_guard_previous;
static uintptr_t ob_guard_page = 4096;

/* Put zeros where `address` is, if a slot covers it; say whether that was done. Signal-safe. */
static int ob_guard_patch(uintptr_t address) {
    int used = atomic_load(&ob_guard_used);
    for (int i = 0; i < used; i++) {
        ObGuardSlot *slot = &ob_guard_slots[i];
        uintptr_t end = atomic_load(&slot->end);
        if (address >= end || address < atomic_load(&slot->start))
            continue;
        void *page = (void *)(address & ~(ob_guard_page - 1));
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
        if (mmap(page, ob_guard_page, PROT_READ, flags, -1, 0) == MAP_FAILED)
            return 0;
        atomic_store(&slot->is_hit, 1);
        atomic_fetch_add(&ob_guard_hits, 1);
        return 1;
    }
    return 0;
}

static void ob_guard_handle(int number, siginfo_t *info, void *context) {
    (void)context;
    /* BUS_ADRERR alone: a page that is not there. Others are broken memory, or sent by kill. */
    if (info->si_code == BUS_ADRERR && ob_guard_patch((uintptr_t)info->si_addr))
        return;
    /* Not ours: restore who was there before and let the access fault again. A handler that has
     * put us back meanwhile would send it here for ever, so that the second time is the last. */
    struct sigaction previous = ob_guard_previous;
    if (atomic_fetch_add(&ob_guard_passed, 1)) {
        memset(&previous, 0, sizeof previous);
        previous.sa_handler = SIG_DFL;
    }
    sigaction(number, &previous, NULL);
    if (info->si_code <= 0)
        raise(number); /* sent, not faulted: nothing repeats it */
}

/* Make the handler the process's, unless it is; 0 if that is not possible. */
static int ob_guard_install(void) {
    struct sigaction found, wanted;
    if (sigaction(SIGBUS, NULL, &found))
        return 0;
    if ((found.sa_flags & SA_SIGINFO) && found.sa_sigaction == ob_guard_handle)
        return 1;
    ob_guard_page = (uintptr_t)sysconf(_SC_PAGESIZE);
    ob_guard_previous = found;
    memset(&wanted, 0, sizeof wanted);
    wanted.sa_sigaction = ob_guard_handle;
    wanted.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&wanted.sa_mask);
    return !sigaction(SIGBUS, &wanted, NULL);
}

/* Cover [start, end) and return its slot, OB_GUARD_SLOTS if there is none left. */
static int ob_guard_add(uintptr_t start, uintptr_t end) {
    int used = atomic_load(&ob_guard_used), i = 0;
    if (!ob_guard_install())
        return OB_GUARD_SLOTS;
    while (i < used && atomic_load(&ob_guard_slots[i].end))
        i++;
    if (i == OB_GUARD_SLOTS)
        return OB_GUARD_SLOTS;
    atomic_store(&ob_guard_slots[i].start, start);
    atomic_store(&ob_guard_slots[i].is_hit, 0);
    atomic_store(&ob_guard_slots[i].end, end);
    if (i == used)
        atomic_store(&ob_guard_used, used + 1);
    return i;
}

static void ob_guard_remove(int slot) { atomic_store(&ob_guard_slots[slot].end, 0); }

static int ob_guard_is_hit(int slot) { return atomic_load(&ob_guard_slots[slot].is_hit); }

static int ob_guard_hit_count(void) { return atomic_load(&ob_guard_hits); }

#endif
