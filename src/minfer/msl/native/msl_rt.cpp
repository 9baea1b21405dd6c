// The SIMT runtime: fibers, their scheduler, and a pool of OS threads that share out the threadgroups of a launch.
#include "msl_host.h"

namespace msl_rt {

__thread Lane *current __attribute__((tls_model("initial-exec")));

// ---- switching stacks: save the callee-saved registers, exchange the stack pointers

#if defined(__x86_64__)
// in msl_rt.h: kernels switch too
#elif defined(__aarch64__)
asm(R"(
.text
.p2align 4
.globl msl_switch
.type msl_switch,%function
msl_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size msl_switch,.-msl_switch
)");
static const int SAVED = 20, ENTRY = 11;
#else
#error "the software Metal device switches stacks on x86-64 and AArch64 only"
#endif

static void fiber_main();

static const u32 never = 0;  // what a lane waits for that others do not set going by counting on

static inline bool runnable(const Lane *l) { return l->state == UNSTARTED || l->state == STEPPED || *l->counter != l->wait; }

static inline u32 lanes_of(const Threadgroup *t, u32 sg) {
    u32 left = t->size - sg * SIMD;
    return left < SIMD ? left : SIMD;
}

// The next lane that can run: cyclic within the simdgroup, then the other simdgroups in the order of this run.
static Lane *pick(Worker *w, Lane *me) {
    Threadgroup *t = &w->tg;
    u32 sg = me->slot / SIMD, n = lanes_of(t, sg), i = me->slot % SIMD;
    for (u32 k = 0; k < n; k++) {
        if (++i >= n) i = 0;
        Lane *l = &w->lane[sg * SIMD + i];
        if (runnable(l)) return l;
    }
    if (w->lockstep) {
        Lane *l = lockstep_release(w, sg);
        if (l) return l;
    }
    for (u32 k = 1; k < t->simdgroups; k++) {
        u32 s = w->order_of[sg] + k;
        s = w->order[s >= t->simdgroups ? s - t->simdgroups : s];
        u32 m = lanes_of(t, s);
        for (u32 j = 0; j < m; j++)
            if (runnable(&w->lane[s * SIMD + j])) return &w->lane[s * SIMD + j];
        if (w->lockstep) {
            Lane *l = lockstep_release(w, s);
            if (l) return l;
        }
    }
    return nullptr;
}

static char *take_stack(Worker *w) {
    if (w->free_stacks) return w->free_stack[--w->free_stacks];
    char *s = w->stacks + (size_t)w->made_stacks++ * STACK;
    mprotect(s, 4096, PROT_NONE);  // an overflow stops at once instead of reaching a neighbour
    return s;
}

static void start(Worker *w, Lane *l) {
    char *s = l->stack = take_stack(w);
    l->state = RUNNING;
    // Tops at one page offset would all fall into the same cache sets.
    size_t stagger = ((l->slot * 0x9E3779B1u) >> 20) & 0x1FC0;
    void **p = (void **)((uintptr_t)(s + STACK - 64 - stagger) & ~(uintptr_t)63);
    *--p = nullptr;
#if defined(__x86_64__)
    *--p = (void *)fiber_main;
#else
    p -= SAVED + 1;
    for (int i = 0; i < SAVED; i++) p[i] = nullptr;
    p[ENTRY] = (void *)fiber_main;
#endif
    l->sp = p;
}

static void switch_to(Worker *w, void **save, Lane *next) {
    if (next->state == UNSTARTED) start(w, next);
    current = next;
    switch_stack(save, next->sp);
}

extern "C" void msl_block(Lane *me, u32 state, u32 generation, u32 site) {
    Worker *w = worker_of(me);
    me->state = state;
    me->site = site;
    me->counter = state == WAIT_SIMD ? &me->sg->generation : state == WAIT_GROUP ? &me->tg->generation : &never;
    me->wait = generation;
    Lane *next = pick(w, me);
    if (!next) deadlock(w, me);
    if (next != me) switch_to(w, &me->sp, next);
    me->state = RUNNING;
}

// A lane has returned: those that wait for everyone now wait for one less.
static void leave(Worker *w, Lane *me) {
    Simdgroup *g = me->sg;
    Threadgroup *t = me->tg;
    me->state = DONE;
    me->counter = &never;
    me->wait = 0;
    g->live &= ~(1u << me->lane);
    g->alive--;
    t->alive--;
    if (g->arrived && w->checked && !w->lockstep) collective_missed(w, me);
    if (g->arrived && g->arrived == g->alive && !w->lockstep) complete(g);
    if (t->arrived && w->checked) barrier_missed(w, me);
    if (t->arrived && t->arrived == t->alive) release_barrier(w);
}

static void fiber_main() {
    for (;;) {
        Lane *me = current;
        Worker *w = worker_of(me);
        w->tg.launch->entry(me);
        leave(w, me);
        Lane *next = w->tg.alive ? pick(w, me) : nullptr;
        void *unused;
        if (next && next->state == UNSTARTED) {  // go on in this stack: a kernel without barriers is a plain loop
            next->stack = me->stack;
            next->state = RUNNING;
            current = next;
            continue;
        }
        if (!next && w->tg.alive) deadlock(w, me);
        w->free_stack[w->free_stacks++] = me->stack;
        if (!next) {
            w->running = false;
            switch_stack(&unused, w->main_sp);
        }
        switch_to(w, &unused, next);
    }
}

// Give up the threadgroup: every fiber is dropped (kernels own nothing that needs a destructor).
[[noreturn]] void abandon(Worker *w) {
    w->running = false;
    w->free_stacks = 0;
    w->abandoned = true;
    for (u32 i = 0; i < w->made_stacks; i++) w->free_stack[w->free_stacks++] = w->stacks + (size_t)i * STACK;
    void *unused;
    switch_stack(&unused, w->main_sp);
    __builtin_unreachable();
}

extern "C" void msl_fail(Lane *me, u32 code, u32 a, u32 b) {
    Worker *w = worker_of(me);
    if (w->checked) report_failure(w, me, code, a, b);
    else record_failure(w->job->failure, &w->tg, me, code, a, b);
    abandon(w);
}

[[noreturn]] void deadlock(Worker *w, Lane *me) {
    // Name two places where lanes wait for each other.
    u32 a = me->site, b = a;
    for (u32 i = 0; i < MAX_LANES; i++) {
        const Lane *l = &w->lane[i];
        if (i / SIMD < w->tg.simdgroups && i % SIMD < lanes_of(&w->tg, i / SIMD) && l->state != DONE && l->state != UNSTARTED) {
            if (a == b && l->site != a) b = l->site;
        }
    }
    msl_fail(me, DEADLOCK, a, b);
}

void record_failure(FailureRecord *f, const Threadgroup *t, const Lane *l, u32 code, u32 a, u32 b) {
    u32 none = OK;
    if (!__atomic_compare_exchange_n(&f->code, &none, code, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return;
    f->a = a;
    f->b = b;
    f->tid = l->tid;
    for (int i = 0; i < 3; i++) f->group[i] = t->position[i];
}

extern "C" void *msl_tg_variable(Lane *me, u32 number, u32 size) {
    Worker *w = worker_of(me);
    Threadgroup *t = &w->tg;
    u32 gap = w->checked ? RED_ZONE : 0, padded = (size + 15) & ~15u;
    if (t->bound + padded > MAX_TGMEM) msl_fail(me, TG_MEMORY, t->bound + padded, MAX_TGMEM);
    char *p = t->arena + t->used;
    t->used += ((padded + 127) & ~127u) + gap;
    t->bound += padded;
    t->variable[number] = p;
    t->variable_size[number] = size;
    if (number >= t->declared) t->declared = number + 1;
    return p;
}

static void shuffle(u32 *v, u32 n, u64 &seed) {
    for (u32 i = n; i > 1; i--) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        u32 j = (u32)(seed >> 33) % i, x = v[i - 1];
        v[i - 1] = v[j];
        v[j] = x;
    }
}

static void run_threadgroup(Worker *w, const Launch *d, u32 id) {
    Threadgroup *t = &w->tg;
    t->launch = d;
    t->linear = id;
    u32 rest = id;
    for (int i = 0; i < 3; i++) {
        t->position[i] = rest % d->groups[i];
        rest /= d->groups[i];
        u32 left = d->grid[i] - t->position[i] * d->threads[i];
        t->dims[i] = left < d->threads[i] ? left : d->threads[i];
    }
    const u32 n = t->dims[0] * t->dims[1] * t->dims[2];
    t->size = t->alive = n;
    t->simdgroups = (n + SIMD - 1) / SIMD;
    t->arrived = t->generation = 0;
    t->barriers[0] = t->barriers[1] = 0;
    for (u32 i = 0; i < t->declared; i++) t->variable[i] = nullptr;
    t->declared = t->used = t->bound = 0;
    u32 gap = w->checked ? RED_ZONE : 0;
    for (u32 i = 0; i < MAX_BUFFERS; i++) {
        if (d->tg_length[i]) {
            t->dynamic[i] = t->arena + t->used;
            t->used += ((d->tg_length[i] + 127) & ~127u) + gap;
            t->bound += (d->tg_length[i] + 15) & ~15u;
        } else {
            t->dynamic[i] = nullptr;
        }
    }
    u64 seed = w->job->seed * 0x9E3779B97F4A7C15u + id + 1;
    const u32 order = w->job->order;
    for (u32 s = 0; s < t->simdgroups; s++) w->order[s] = order == BACKWARD ? t->simdgroups - 1 - s : s;
    if (order == SHUFFLED) shuffle(w->order, t->simdgroups, seed);
    for (u32 s = 0; s < t->simdgroups; s++) w->order_of[w->order[s]] = s;
    u32 x = 0, y = 0, z = 0, place[SIMD];
    for (u32 s = 0; s < t->simdgroups; s++) {
        Simdgroup *g = &w->sg[s];
        const u32 m = lanes_of(t, s);
        g->alive = m;
        g->live = m == SIMD ? ~0u : (1u << m) - 1;
        g->arrived = g->generation = 0;
        g->barriers[0] = g->barriers[1] = 0;
        g->lanes = m;
        for (u32 k = 0; k < m; k++) place[k] = order == BACKWARD ? m - 1 - k : k;
        if (order == SHUFFLED) shuffle(place, m, seed);
        for (u32 k = 0; k < m; k++) {
            Lane *l = &w->lane[s * SIMD + place[k]];
            l->slot = s * SIMD + place[k];
            l->state = UNSTARTED;
            l->counter = &never;
            l->wait = 0;
            l->next = &w->lane[s * SIMD + (place[k] + 1) % m];
            l->sg = g;
            l->tg = t;
            l->lane = k;
            l->tid = s * SIMD + k;
            l->depth = l->site = 0;
            l->x = x;
            l->y = y;
            l->z = z;
            if (++x == t->dims[0]) {
                x = 0;
                if (++y == t->dims[1]) { y = 0; z++; }
            }
        }
    }
    if (w->checked) checks_begin_group(w);
    w->abandoned = false;
    w->running = true;
    switch_to(w, &w->main_sp, &w->lane[w->order[0] * SIMD]);
    current = nullptr;
    if (w->checked) checks_end_group(w);
}

// ---- the pool

static Pool *pool;

static Worker *make_worker() {
    if (pool->workers == MAX_WORKERS) return nullptr;
    Worker *w = (Worker *)mmap(nullptr, sizeof(Worker), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *stacks = mmap(nullptr, (size_t)STACK * MAX_LANES, PROT_READ | PROT_WRITE, flags, -1, 0);
    void *arena = mmap(nullptr, ARENA, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (w == MAP_FAILED || stacks == MAP_FAILED || arena == MAP_FAILED) return nullptr;
    w->stacks = (char *)stacks;
    __atomic_store_n(&pool->worker[pool->workers], w, __ATOMIC_RELEASE);
    __atomic_fetch_add(&pool->workers, 1, __ATOMIC_RELEASE);
    w->tg.arena = (char *)arena;
    return w;
}

static u32 threadgroup_at(const Job *job, u32 i) { return job->group_order ? job->group_order[i] : i; }

static void work(Worker *w, Job *job) {
    w->job = job;
    w->checked = job->launch->checks != nullptr;
    w->lockstep = job->order == LOCKSTEP;
    for (;;) {
        u32 i = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (i >= job->total || __atomic_load_n(&job->failure->code, __ATOMIC_RELAXED)) break;
        __atomic_store_n(&w->steps, w->steps + 1, __ATOMIC_RELAXED);
        run_threadgroup(w, job->launch, threadgroup_at(job, i));
        __atomic_store_n(&w->steps, w->steps + 1, __ATOMIC_RELAXED);
    }
}

// Helpers look for a job that is open. They join by counting themselves in, so the owner knows when the job is unused.
static void *helper(void *arg) {
    Worker *w = (Worker *)arg;
    w->thread = pthread_self();
    u32 seen = 0, idle = 0;
    for (;;) {
        u32 turn = __atomic_load_n(&pool->turn, __ATOMIC_ACQUIRE);
        if (turn == seen) {
            if (++idle < SPINS) { spin_pause(); continue; }
            if (__atomic_load_n(&pool->session, __ATOMIC_ACQUIRE)) { sched_yield(); continue; }
            pthread_mutex_lock(&pool->mutex);
            while (__atomic_load_n(&pool->turn, __ATOMIC_ACQUIRE) == seen) pthread_cond_wait(&pool->wake, &pool->mutex);
            pthread_mutex_unlock(&pool->mutex);
            idle = 0;
            continue;
        }
        idle = 0;
        seen = turn;
        const u32 others = __atomic_fetch_add(&pool->inside, 1, __ATOMIC_SEQ_CST);
        Job *job = __atomic_load_n(&pool->job, __ATOMIC_SEQ_CST);
        if (job && others + 1 < job->threads) work(w, job);  // the pool may be larger than this job asks for
        __atomic_fetch_sub(&pool->inside, 1, __ATOMIC_SEQ_CST);
    }
    return nullptr;
}

// ---- the watchdog: a threadgroup that does not end is given up, by a signal to the OS thread that runs it. Kernels own
// nothing that needs a destructor and hold no lock, so a thread may leave one wherever it is.

static u32 current_run() { return __atomic_load_n(&pool->run, __ATOMIC_SEQ_CST); }

static void give_up(int) {
    Lane *me = current;
    if (me && worker_of(me)->running && current_run() % 2 && pool->failure->code == TIMED_OUT) abandon(worker_of(me));
}

static u32 steps() {
    u32 sum = 0;
    for (u32 i = 0; i < __atomic_load_n(&pool->workers, __ATOMIC_ACQUIRE); i++)
        sum += __atomic_load_n(&pool->worker[i]->steps, __ATOMIC_RELAXED);
    return sum;
}

static void stop(u32 run) {
    u32 none = OK;
    struct sigaction act = {}, before;
    act.sa_handler = give_up;
    act.sa_flags = SA_NODEFER | SA_RESTART;  // the handler need not return
    sigaction(SIGURG, &act, &before);
    pool->failure->a = (u32)pool->timeout_ms;
    __atomic_compare_exchange_n(&pool->failure->code, &none, TIMED_OUT, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
    while (current_run() == run) {
        for (u32 i = 0; i < pool->workers; i++)
            if (__atomic_load_n(&pool->worker[i]->running, __ATOMIC_ACQUIRE)) pthread_kill(pool->worker[i]->thread, SIGURG);
        usleep(WATCH_MS * 1000);
    }
    sigaction(SIGURG, &before, nullptr);
}

static void *watch(void *) {
    u32 seen = 0;
    u64 still = 0;
    for (;;) {
        const u32 run = current_run();
        if (run % 2 == 0) {  // sleep until a run wakes us
            pthread_mutex_lock(&pool->mutex);
            __atomic_store_n(&pool->watched, 0, __ATOMIC_SEQ_CST);
            while (current_run() % 2 == 0) pthread_cond_wait(&pool->watch, &pool->mutex);
            __atomic_store_n(&pool->watched, 1, __ATOMIC_SEQ_CST);
            pthread_mutex_unlock(&pool->mutex);
            still = 0;
            continue;
        }
        usleep(WATCH_MS * 1000);
        const u32 now = steps();
        still = now == seen ? still + WATCH_MS : 0;
        seen = now;
        if (still >= pool->timeout_ms && current_run() == run) stop(run);
    }
    return nullptr;
}

static bool start_thread(void *(*main)(void *), void *arg) {
    pthread_t id;
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    return pthread_create(&id, &attr, main, arg) == 0;
}

static bool make_pool(u32 threads) {
    if (!pool) {
        pool = (Pool *)calloc(1, sizeof(Pool));
        pthread_mutex_init(&pool->mutex, nullptr);
        pthread_cond_init(&pool->wake, nullptr);
        pthread_cond_init(&pool->watch, nullptr);
        pool->main = make_worker();
        if (!pool->main || !start_thread(watch, nullptr)) return false;
    }
    while (pool->helpers + 1 < threads) {
        Worker *w = make_worker();
        if (!w || !start_thread(helper, w)) return false;
        pool->helpers++;
    }
    return true;
}

static void run_one(const Launch *d, const RunOptions *o, FailureRecord *failure, bool alone) {
    Job job = {};
    job.launch = d;
    job.failure = failure;
    job.total = d->groups[0] * d->groups[1] * d->groups[2];
    job.order = o->order;
    job.seed = o->seed;
    job.threads = o->threads;
    u32 *order = nullptr;
    if (o->order == SHUFFLED || o->order == BACKWARD) {
        order = (u32 *)malloc(sizeof(u32) * (job.total + 1));
        for (u32 i = 0; i < job.total; i++) order[i] = o->order == BACKWARD ? job.total - 1 - i : i;
        u64 seed = o->seed ^ 0xD1B54A32D192ED03u;
        if (o->order == SHUFFLED) shuffle(order, job.total, seed);
    }
    job.group_order = order;
    // A few small threadgroups are done before a helper would have woken up.
    const u64 threads = (u64)job.total * d->threads[0] * d->threads[1] * d->threads[2];
    if (alone || job.threads == 1 || job.total == 1 || threads <= 256 || !pool->helpers) {
        work(pool->main, &job);
    } else {
        __atomic_store_n(&pool->job, &job, __ATOMIC_SEQ_CST);
        __atomic_fetch_add(&pool->turn, 1, __ATOMIC_SEQ_CST);
        if (!pool->awake) {
            pthread_mutex_lock(&pool->mutex);
            pthread_cond_broadcast(&pool->wake);
            pthread_mutex_unlock(&pool->mutex);
            pool->awake = __atomic_load_n(&pool->session, __ATOMIC_RELAXED);
        }
        work(pool->main, &job);
        __atomic_store_n(&pool->job, (Job *)nullptr, __ATOMIC_SEQ_CST);
        for (u32 k = 0; __atomic_load_n(&pool->inside, __ATOMIC_SEQ_CST); k++) {
            if (k < SPINS) spin_pause();
            else sched_yield();
        }
    }
    free(order);
}

// Run `count` launches in this order. Stops at the first that fails; returns how many ran to their end.
extern "C" MSL_EXPORT u32 msl_run(const Launch *launches, u32 count, const RunOptions *options, FailureRecord *failure) {
    failure->code = OK;
    static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&one_at_a_time);
    u32 done = 0;
    if (!make_pool(options->threads)) {
        failure->code = STOPPED;
    } else {
        __atomic_store_n(&pool->session, count > 1, __ATOMIC_RELEASE);
        pool->awake = false;
        pool->main->thread = pthread_self();
        pool->timeout_ms = options->timeout_ms;
        pool->failure = failure;
        __atomic_fetch_add(&pool->run, 1, __ATOMIC_SEQ_CST);
        if (!__atomic_load_n(&pool->watched, __ATOMIC_SEQ_CST)) {
            pthread_mutex_lock(&pool->mutex);
            pthread_cond_signal(&pool->watch);
            pthread_mutex_unlock(&pool->mutex);
        }
        for (; done < count && failure->code == OK; done++) {
            const bool checked = launches[done].checks != nullptr;
            if (checked) checks_begin_launch(&launches[done], options);
            run_one(&launches[done], options, failure, checked || options->order == LOCKSTEP);
            if (checked) checks_end_launch(&launches[done]);
        }
        __atomic_fetch_add(&pool->run, 1, __ATOMIC_SEQ_CST);
        if (failure->code != OK) done--;
        __atomic_store_n(&pool->session, 0, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&one_at_a_time);
    return done;
}

extern "C" MSL_EXPORT u32 msl_layout(u32 what) {
    const u32 sizes[] = {sizeof(Launch), sizeof(RunOptions), sizeof(FailureRecord), sizeof(Checks), sizeof(Finding)};
    return what < 5 ? sizes[what] : 0;
}

}  // namespace msl_rt
