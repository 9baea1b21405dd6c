// The SIMT runtime as a kernel sees it: lanes are fibers, a threadgroup runs on one OS thread.
// Included by translated kernels, so no C or C++ library header here (see msl_types.h).
#pragma once

#define MSL_HIDDEN __attribute__((visibility("hidden")))
#define MSL_EXPORT __attribute__((visibility("default")))
#define MSL_INLINE inline __attribute__((always_inline))
#define MSL_NOT_CHECKED __attribute__((no_sanitize("thread")))
#if defined(MSL_INSTRUMENTED)
// The runtime's own loads and stores are not the kernel's: keep them out of the instrumentation.
#define MSL_RUNTIME __attribute__((no_sanitize("thread"), noinline))
#else
#define MSL_RUNTIME __attribute__((always_inline))
#endif

namespace msl_rt {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long u64;

enum { SIMD = 32, MAX_LANES = 1024, MAX_BUFFERS = 31, MAX_TGVARS = 64, MAX_TGMEM = 32768, SLOT = 32, MAX_DEPTH = 32 };
enum State : u32 { UNSTARTED, RUNNING, STEPPED, WAIT_SIMD, WAIT_GROUP, WAIT_STEP, DONE };

// Where a barrier or collective is called. The line is what lanes that meet must share; instrumented code also knows the
// program counter, which tells how far a lane is.
#if defined(MSL_INSTRUMENTED) || defined(MSL_HOST)
struct Site { u32 line; u64 pc; };
MSL_INLINE Site here(u32 line) {
    u64 pc;
#if defined(__x86_64__)
    asm volatile("lea 0(%%rip), %0" : "=r"(pc));
#else
    asm volatile("adr %0, ." : "=r"(pc));
#endif
    return Site{line, pc};
}
MSL_INLINE u32 line_of(Site s) { return s.line; }
#else
typedef u32 Site;
MSL_INLINE Site here(u32 line) { return line; }
MSL_INLINE u32 line_of(Site s) { return s; }
#endif

struct Threadgroup;
struct Lane;
struct Checks;
typedef void (*Entry)(Lane *);

// One launch, as the host fills it in (mirrored by runtime.py). `length` counts from the bound offset; 0 and a null
// buffer mean unbound. `grid` is in threads; edge threadgroups may be smaller.
struct Launch {
    Entry entry;
    u64 buffer[MAX_BUFFERS];
    u64 length[MAX_BUFFERS];
    u32 tg_length[MAX_BUFFERS];
    u32 groups[3], threads[3], grid[3];
    u32 flags;        // bit 0: instrumented code
    Checks *checks;   // null when nothing is checked or counted
};

struct alignas(64) Simdgroup {
    u32 alive, arrived, generation, site;
    u32 live, mask[2], ready[2];         // a bit a lane: those that have not returned; those that brought a value
    u32 barriers[2];                     // simdgroup barriers passed: with mem_threadgroup, with mem_device
    u32 lanes, flags, expected, released;  // lanes it began with; instrumented code: see checks.cpp
    alignas(64) u8 value[2][SIMD * SLOT];  // what each lane brought to the collective (two, so a fast lane cannot overwrite)
    alignas(64) u8 result[2][SLOT];
};

struct alignas(64) Lane {
    void *sp;
    Simdgroup *sg;
    Threadgroup *tg;
    const u32 *counter;  // a lane that waits can go on when this is no longer `wait`
    Lane *next;          // the next of its simdgroup in turn
    u32 wait, lane, site, state;
    u32 tid, x, y, z;
    u32 slot, depth;
    char *stack;
    u64 pc;         // lockstep: where the lane is, see struct Progress
};

struct Threadgroup {
    const Launch *launch;
    u32 size, simdgroups, alive, arrived, generation, site;
    u32 position[3], dims[3];
    u32 linear;                          // index of the threadgroup in its launch
    u32 flags;                           // of the pending barrier
    u32 barriers[2];                     // threadgroup barriers passed: with mem_threadgroup, with mem_device
    u32 declared, used, bound;
    char *dynamic[MAX_BUFFERS];
    char *variable[MAX_TGVARS];
    u32 variable_size[MAX_TGVARS];
    char *arena;
};

// The lane that runs on this OS thread. Fibers never move between OS threads.
extern MSL_EXPORT __thread Lane *current __attribute__((tls_model("initial-exec")));

// Leave this stack for another: `*save` keeps where. A stack that was left has on top where to go on.
#if defined(__x86_64__)
#if defined(__AVX512F__)
#define MSL_UPPER_REGISTERS , "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "xmm26", \
    "xmm27", "xmm28", "xmm29", "xmm30", "xmm31", "k1", "k2", "k3", "k4", "k5", "k6", "k7"
#else
#define MSL_UPPER_REGISTERS
#endif
MSL_INLINE void switch_stack(void **save, void *to) {
    asm volatile(
        "leaq -128(%%rsp), %%rsp\n\t"  // a leaf function may use what lies below its stack pointer
        "pushq %%rbp\n\t"
        "leaq 1f(%%rip), %%rax\n\t"
        "pushq %%rax\n\t"
        "movq %%rsp, (%0)\n\t"
        "movq %1, %%rsp\n\t"
        "popq %%rax\n\t"
        "jmp *%%rax\n"
        "1:\n\t"
        "popq %%rbp\n\t"
        "leaq 128(%%rsp), %%rsp"
        : "+D"(save), "+S"(to)
        :
        : "memory", "cc", "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0", "xmm1", "xmm2",
          "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14",
          "xmm15" MSL_UPPER_REGISTERS);
}
#else
extern "C" MSL_EXPORT void msl_switch(void **save, void *to);
MSL_INLINE void switch_stack(void **save, void *to) { msl_switch(save, to); }
#endif

extern "C" {
MSL_EXPORT void msl_block(Lane *me, u32 state, u32 generation, u32 site);
[[noreturn]] MSL_EXPORT void msl_fail(Lane *me, u32 code, u32 a, u32 b);
MSL_EXPORT void *msl_tg_variable(Lane *me, u32 number, u32 size);
#if defined(MSL_INSTRUMENTED) || defined(MSL_HOST)
MSL_EXPORT void msl_collective_enter(Lane *me, Site site);
MSL_EXPORT void msl_collective_arrive(Lane *me, Site site, u32 count, u32 flags);
MSL_EXPORT void msl_checked_barrier(Lane *me, u32 flags, Site site);
MSL_EXPORT void msl_loop_enter(u64 pc);
MSL_EXPORT void msl_loop_next();
MSL_EXPORT void msl_loop_leave();
MSL_EXPORT void msl_misaligned(const volatile void *p, u32 alignment, Site site);
MSL_EXPORT void msl_checked_atomic(const volatile void *p, u32 size, u32 kind, Site site);
#endif
}
enum Failure : u32 { OK, DIVERGENT_SIMD, DIVERGENT_BARRIER, DEADLOCK, TG_MEMORY, UNBOUND, STOPPED, TOO_DEEP, TIMED_OUT };
enum Count : u32 { COUNT_COLLECTIVE, COUNT_SIMD_BARRIER, COUNT_MATRIX };

#if defined(MSL_LOCKSTEP)
// Around every loop of a lockstep kernel; the translator adds the call of next() to the loop's condition.
struct Loop {
    bool first = true;
    MSL_INLINE Loop(Site s) { msl_loop_enter(s.pc); }
    MSL_INLINE ~Loop() { msl_loop_leave(); }
    MSL_INLINE bool once() { const bool now = first; first = false; return now; }
    MSL_INLINE bool next() { msl_loop_next(); return true; }
};
#define MSL_LOOP for (msl_rt::Loop msl_loop(msl_rt::here(0)); msl_loop.once();)
#endif

// Every live lane has come to the collective.
MSL_INLINE void complete(Simdgroup *g) {
    const u32 p = g->generation & 1;
    g->mask[p] = g->live;
    g->ready[p] = 0;
    g->arrived = 0;
    g->generation++;
}

#if !defined(MSL_HOST)
// Let others run until `*counter` moves on. Mostly the next lane can: lanes come to a collective one after the other.
MSL_INLINE void wait_for(Lane *me, const u32 *counter, u32 state, Site site) {
    Lane *next = me->next;
    if (__builtin_expect(*next->counter != next->wait, 1)) {
        me->counter = counter;
        me->wait = *counter;
        me->site = line_of(site);
        current = next;
        switch_stack(&me->sp, next->sp);
    } else {
        msl_block(me, state, *counter, line_of(site));
    }
}

// Wait for every live lane of the simdgroup. `put(area, lane)` stores what this lane brings; returns which of the two
// value areas belongs to this collective.
template <class F> MSL_RUNTIME Simdgroup *meet(F put, u32 &p, Site site, u32 count, u32 flags) {
    Lane *me = current;
    Simdgroup *g = me->sg;
#if defined(MSL_INSTRUMENTED)
    msl_collective_enter(me, site);
    p = g->generation & 1;
    put(g->value[p], me->lane);
    msl_collective_arrive(me, site, count, flags);
#else
    (void)count;
    (void)flags;
    p = g->generation & 1;
    if (g->arrived == 0) g->site = site;
    else if (__builtin_expect(g->site != site, 0)) msl_fail(me, DIVERGENT_SIMD, g->site, site);
    put(g->value[p], me->lane);
    if (++g->arrived == g->alive) complete(g);
    else wait_for(me, &g->generation, WAIT_SIMD, site);
#endif
    return g;
}
template <class T> struct PutValue {
    const T &x;
    MSL_RUNTIME void operator()(u8 *area, u32 lane) const { ((T *)area)[lane] = x; }
};
template <class T> MSL_RUNTIME Simdgroup *exchange(const T &x, u32 &p, Site site, u32 count = COUNT_COLLECTIVE, u32 flags = 0) {
    static_assert(sizeof(T) <= SLOT, "this type is too wide for a simdgroup function");
    return meet(PutValue<T>{x}, p, site, count, flags);
}

MSL_RUNTIME inline u32 lane_index() { return current->lane; }
template <class T> MSL_RUNTIME T lane_value(const Simdgroup *g, u32 p, u32 lane) { return ((const T *)g->value[p])[lane]; }

MSL_RUNTIME inline void barrier(u32 flags, Site site) {
    Lane *me = current;
#if defined(MSL_INSTRUMENTED)
    msl_checked_barrier(me, flags, site);
#else
    (void)flags;
    Threadgroup *t = me->tg;
    if (t->arrived == 0) t->site = site;
    else if (__builtin_expect(t->site != site, 0)) msl_fail(me, DIVERGENT_BARRIER, t->site, site);
    if (++t->arrived == t->alive) {
        t->arrived = 0;
        t->generation++;
    } else {
        wait_for(me, &t->generation, WAIT_GROUP, site);
    }
#endif
}

#if defined(MSL_INSTRUMENTED)
// `Cast<T *>() ->* p` is (T *)p with a look at the address; `*Cast<T *>() ->* p` dereferences it.
template <class P> struct Cast {
    Site site;
    MSL_INLINE Cast(Site s = here(__builtin_LINE())) : site(s) {}
    template <class A> MSL_INLINE P operator->*(A a) const {
        P p = (P)a;
        if ((u64)p % alignof(decltype(*p)) != 0) msl_misaligned(p, alignof(decltype(*p)), site);
        return p;
    }
    struct Target {
        Cast cast;
        template <class A> MSL_INLINE decltype(auto) operator->*(A a) const { return *(cast->*a); }
    };
    MSL_INLINE Target operator*() const { return Target{*this}; }
};
#endif

// ---- kernel arguments: conversions, so that the wrapper need not know the parameter's (perhaps dependent) type

struct Pointer {
    u64 at;
    template <class T> MSL_RUNTIME operator T *() const { return (T *)at; }
};
struct Reference {
    u64 at;
    template <class T> MSL_RUNTIME operator T &() const { return *(T *)at; }
};
MSL_RUNTIME inline Pointer buffer(Lane *l, u32 slot) { return Pointer{l->tg->launch->buffer[slot]}; }
MSL_RUNTIME inline Reference buffer_ref(Lane *l, u32 slot) { return Reference{l->tg->launch->buffer[slot]}; }
MSL_RUNTIME inline Pointer tg_buffer(Lane *l, u32 slot) { return Pointer{(u64)l->tg->dynamic[slot]}; }
MSL_RUNTIME inline Reference tg_ref(Lane *l, u32 slot) { return Reference{(u64)l->tg->dynamic[slot]}; }
MSL_RUNTIME inline void *tg_variable(u32 number, u32 size) {
    Lane *me = current;
    char *p = me->tg->variable[number];
    return __builtin_expect(p != nullptr, 1) ? p : msl_tg_variable(me, number, size);
}
struct Id {
    u32 x, y, z;
    MSL_RUNTIME operator u32() const { return x; }
    MSL_RUNTIME operator u16() const { return (u16)x; }
    MSL_RUNTIME operator metal::vec<u32, 2>() const { return metal::vec<u32, 2>(x, y); }
    MSL_RUNTIME operator metal::vec<u16, 2>() const { return metal::vec<u16, 2>(x, y); }
    MSL_RUNTIME operator metal::vec<u32, 3>() const { return metal::vec<u32, 3>(x, y, z); }
    MSL_RUNTIME operator metal::vec<u16, 3>() const { return metal::vec<u16, 3>(x, y, z); }
};
#define MSL_ID(name, X, Y, Z) MSL_RUNTIME inline Id name(Lane *l) { const Threadgroup *t = l->tg; (void)t; return Id{X, Y, Z}; }
MSL_ID(thread_position_in_grid, t->position[0] * t->launch->threads[0] + l->x, t->position[1] * t->launch->threads[1] + l->y,
       t->position[2] * t->launch->threads[2] + l->z)
MSL_ID(threadgroup_position_in_grid, t->position[0], t->position[1], t->position[2])
MSL_ID(thread_position_in_threadgroup, l->x, l->y, l->z)
MSL_ID(threads_per_threadgroup, t->dims[0], t->dims[1], t->dims[2])
MSL_ID(dispatch_threads_per_threadgroup, t->launch->threads[0], t->launch->threads[1], t->launch->threads[2])
MSL_ID(threads_per_grid, t->launch->grid[0], t->launch->grid[1], t->launch->grid[2])
MSL_ID(threadgroups_per_grid, t->launch->groups[0], t->launch->groups[1], t->launch->groups[2])
#undef MSL_ID
#define MSL_ID(name, X) MSL_RUNTIME inline u32 name(Lane *l) { const Threadgroup *t = l->tg; (void)t; return X; }
MSL_ID(thread_index_in_threadgroup, l->tid)
MSL_ID(thread_index_in_simdgroup, l->lane)
MSL_ID(simdgroup_index_in_threadgroup, l->tid / SIMD)
MSL_ID(simdgroups_per_threadgroup, t->simdgroups)
MSL_ID(dispatch_simdgroups_per_threadgroup, (t->launch->threads[0] * t->launch->threads[1] * t->launch->threads[2] + SIMD - 1) / SIMD)
MSL_ID(threads_per_simdgroup, SIMD)
MSL_ID(thread_execution_width, SIMD)
MSL_ID(thread_index_in_quadgroup, l->lane % 4)
MSL_ID(quadgroup_index_in_threadgroup, l->tid / 4)
MSL_ID(quadgroups_per_threadgroup, (t->size + 3) / 4)
MSL_ID(dispatch_quadgroups_per_threadgroup, (t->launch->threads[0] * t->launch->threads[1] * t->launch->threads[2] + 3) / 4)
#undef MSL_ID
#endif  // !MSL_HOST

}  // namespace msl_rt
