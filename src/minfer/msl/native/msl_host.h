// What the parts of the runtime share among themselves; kernels never see it.
#pragma once
#define MSL_HOST
#include "msl_rt.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

namespace msl_rt {

enum : u32 { STACK = 128 * 1024, ARENA = 1 << 20, RED_ZONE = 1024, SPINS = 2000, MAX_WORKERS = 1024, WATCH_MS = 20 };
enum Order : u32 { FORWARD, BACKWARD, SHUFFLED, LOCKSTEP };

struct FailureRecord {
    u32 code, a, b, tid, group[3], launch;
};
struct RunOptions {
    u32 threads, order;
    u64 seed;
    u64 timeout_ms;  // how long no threadgroup may begin or end
};

// ---- checked launches (mirrored by checks.py)

enum Kind : u32 {
    BEYOND_READ = 1, BEYOND_WRITE, NOT_BOUND, MISALIGNED, UNINITIALISED_DEVICE, UNINITIALISED_THREADGROUP, RACE_THREADGROUP,
    RACE_DEVICE, RACE_GROUPS, BARRIER_DIVERGED, BARRIER_MISSED, COLLECTIVE_DIVERGED, COLLECTIVE_MISSED, WAIT_FOR_EACH_OTHER,
    UNDECLARED_READ, UNDECLARED_WRITE, BEYOND_THREADGROUP_READ, BEYOND_THREADGROUP_WRITE, CONSTANT_WRITE, INDEX, DIVISION,
    TOO_MUCH_THREADGROUP,
};
struct Finding {
    u64 pc, other_pc, offset, size, file, count;
    u32 kind, slot, tid, group, other_tid, other_group, line, other_line, detail, unused;
};
struct Binding {  // declared ranges of a slot, as addresses, and what of its buffer holds values
    u64 start, end, writable_start, writable_end;
    u8 *initialised;
    u64 initialised_from;
};
struct Checks {
    Binding binding[MAX_BUFFERS];
    u64 image_start, image_end;         // the loaded kernel: its constants
    Finding *finding;
    u32 max_findings, findings, total, count;
    u64 barriers, collectives[3];
    u64 bytes[MAX_BUFFERS][2];
    u8 *touched[MAX_BUFFERS][2];
};

struct Job {
    const Launch *launch;
    FailureRecord *failure;
    u32 *group_order;
    u64 seed;
    u32 order, next, total, threads;
};
// Lockstep: how far a lane is. Its `pc` lies within the innermost entry of `path`; an entry is a call that is being made
// (its return address) or a loop (where it starts, and which iteration).
struct Progress {
    u64 path[MAX_DEPTH], iteration[MAX_DEPTH];
};
struct Worker {
    Threadgroup tg;
    Job *job;
    void *main_sp;
    char *stacks;
    bool checked, lockstep, abandoned;
    bool running;                       // a threadgroup's fibers have this OS thread
    pthread_t thread;
    u32 steps;                          // threadgroups begun and ended
    u32 made_stacks, free_stacks;
    u32 order[MAX_LANES / SIMD], order_of[MAX_LANES / SIMD];
    char *free_stack[MAX_LANES];
    Lane lane[MAX_LANES];
    Simdgroup sg[MAX_LANES / SIMD];
    Progress progress[MAX_LANES];  // by slot
};
struct Pool {
    pthread_mutex_t mutex;
    pthread_cond_t wake, watch;
    Worker *main;
    Job *job;
    u32 helpers, turn, inside, session;
    bool awake;
    // the watchdog
    Worker *worker[MAX_WORKERS];
    FailureRecord *failure;             // of this run, or the last
    u64 timeout_ms;
    u32 workers, run, watched;          // `run` is odd while one goes on
};

static inline Worker *worker_of(const Lane *l) { return (Worker *)l->tg; }  // the threadgroup is a worker's first member
static inline void spin_pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    asm volatile("yield");
#endif
}

void record_failure(FailureRecord *f, const Threadgroup *t, const Lane *l, u32 code, u32 a, u32 b);
[[noreturn]] void abandon(Worker *w);
[[noreturn]] void deadlock(Worker *w, Lane *me);

// checks.cpp
void report_failure(Worker *w, Lane *me, u32 code, u32 a, u32 b);
void barrier_missed(Worker *w, Lane *me);
void release_barrier(Worker *w);
void step(Lane *me, u64 pc);
void collective_missed(Worker *w, Lane *me);
Lane *lockstep_release(Worker *w, u32 sg);
void checks_begin_launch(const Launch *d, const RunOptions *o);
void checks_end_launch(const Launch *d);
void checks_begin_group(Worker *w);
void checks_end_group(Worker *w);

}  // namespace msl_rt
