/*
 * Threads that share out the tasks of one call, and sleep between calls.
 *
 * The caller works too, and takes a task whenever it is free: a thread that wakes late, or not at
 * all, costs nothing but its share. One call at a time has the crew; another one that comes
 * meanwhile does its tasks alone. A fork forgets the threads, which it does not have.
 */
#ifndef OB_CREW_H
#define OB_CREW_H

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>

typedef void (*ObTask)(void *call, int64_t number, int worker);

enum { OB_CREW_SPINS = 4000 }; /* before the caller sleeps: at most about 0.2 ms */

static struct {
    pthread_mutex_t taken; /* by the call that has the crew */
    pthread_mutex_t lock; /* of all below but `next` and `working` */
    pthread_cond_t called, ended;
    int started; /* threads there are */
    int wanted; /* threads that the call still takes in; the next one is worker number `wanted` */
    ObTask task;
    void *call;
    int64_t count;
    _Atomic int64_t next; /* the first task that nobody has taken */
    atomic_int working;
} ob_crew = {
    .taken = PTHREAD_MUTEX_INITIALIZER,
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .called = PTHREAD_COND_INITIALIZER,
    .ended = PTHREAD_COND_INITIALIZER,
};
static pthread_once_t ob_crew_once = PTHREAD_ONCE_INIT;

static void ob_crew_share(int worker) {
    for (;;) {
        int64_t number = atomic_fetch_add(&ob_crew.next, 1);
        if (number >= ob_crew.count) return;
        ob_crew.task(ob_crew.call, number, worker);
    }
}

static void *ob_crew_live(void *nothing) {
    pthread_mutex_lock(&ob_crew.lock);
    for (;;) {
        while (!ob_crew.wanted) pthread_cond_wait(&ob_crew.called, &ob_crew.lock);
        int worker = ob_crew.wanted--;
        atomic_fetch_add(&ob_crew.working, 1);
        pthread_mutex_unlock(&ob_crew.lock);
        ob_crew_share(worker);
        pthread_mutex_lock(&ob_crew.lock);
        if (atomic_fetch_sub(&ob_crew.working, 1) == 1) pthread_cond_signal(&ob_crew.ended);
    }
    return nothing;
}

static void ob_crew_forget(void) {
    pthread_mutex_init(&ob_crew.taken, NULL);
    pthread_mutex_init(&ob_crew.lock, NULL);
    pthread_cond_init(&ob_crew.called, NULL);
    pthread_cond_init(&ob_crew.ended, NULL);
    ob_crew.started = ob_crew.wanted = 0;
    atomic_store(&ob_crew.working, 0);
}

static void ob_crew_heed_forks(void) { pthread_atfork(NULL, NULL, ob_crew_forget); }

/* Start threads until there are `wanted`, or the system has no more. The lock is held. */
static void ob_crew_start(int wanted) {
    sigset_t sent, before;
    pthread_attr_t attributes;
    sigfillset(&sent); /* signals are for the process's other threads, faults (guard.h) for ours */
    sigdelset(&sent, SIGBUS);
    sigdelset(&sent, SIGSEGV);
    sigdelset(&sent, SIGFPE);
    sigdelset(&sent, SIGILL);
    pthread_sigmask(SIG_SETMASK, &sent, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    for (pthread_t thread; ob_crew.started < wanted; ob_crew.started++)
        if (pthread_create(&thread, &attributes, ob_crew_live, NULL)) break;
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Do tasks 0, …, count - 1 in up to `threads` threads: worker 0 is the caller, the others have
 * numbers below `threads`, and no two that run at once have the same. Returns when all are done. */
static void ob_crew_run(int threads, int64_t count, ObTask task, void *call) {
    pthread_once(&ob_crew_once, ob_crew_heed_forks);
    if (threads > count) threads = (int)count;
    if (threads < 2 || pthread_mutex_trylock(&ob_crew.taken)) {
        for (int64_t number = 0; number < count; number++) task(call, number, 0);
        return;
    }
    pthread_mutex_lock(&ob_crew.lock);
    if (ob_crew.started < threads - 1) ob_crew_start(threads - 1);
    ob_crew.task = task;
    ob_crew.call = call;
    ob_crew.count = count;
    atomic_store(&ob_crew.next, 0);
    ob_crew.wanted = threads - 1;
    for (int i = 0; i < ob_crew.wanted; i++) pthread_cond_signal(&ob_crew.called);
    pthread_mutex_unlock(&ob_crew.lock);
    ob_crew_share(0);
    for (int i = 0; i < OB_CREW_SPINS && atomic_load(&ob_crew.working); i++) {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
    }
    pthread_mutex_lock(&ob_crew.lock);
    ob_crew.wanted = 0; /* who is late has nothing to do */
    while (atomic_load(&ob_crew.working)) pthread_cond_wait(&ob_crew.ended, &ob_crew.lock);
    pthread_mutex_unlock(&ob_crew.lock);
    pthread_mutex_unlock(&ob_crew.taken);
}

#endif
