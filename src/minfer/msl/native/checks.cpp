// The checked mode. Kernels are compiled with -fsanitize=thread, but its callbacks are these, so every load and store of a
// kernel arrives here with its address before it happens. A checked launch runs on one OS thread.
#include "msl_host.h"

namespace msl_rt {

struct Cell {  // what is known of one byte; void unless `stamp` is that of this launch (or threadgroup)
    u32 stamp, flags;
    u32 write_group, read_group;
    u32 write_epoch, write_step, read_epoch, read_step;  // barriers that the threadgroup and the simdgroup had passed
    u32 write_pc, read_pc;
    u16 write_tid, read_tid;
};
enum : u32 { WRITTEN = 1, READ = 2, MANY_LANES = 4, MANY_SIMDGROUPS = 8, MANY_GROUPS = 16, ATOMIC = 32, ATOMIC_READ = 64 };

struct Segment {  // a stretch of device memory that the same bindings cover
    u64 start, end;
    u32 slot, access, bound;   // declared access; `bound` tells that a binding reaches here at all
    bool tracked;              // some binding may write here: races are possible
    u64 shadow;                // index of the first cell
    u8 *initialised;           // one bit a byte, or null: all of it
    u64 initialised_from;
};

static struct {
    const Launch *launch;
    Checks *checks;
    Segment segment[4 * MAX_BUFFERS + 4];
    u32 segments, stamp, group_stamp;
    u8 hint[256];
    Cell *device, *local;
    u64 device_cells;
    struct { u64 start, end; u32 name; } extent[MAX_BUFFERS + MAX_TGVARS];
    u32 extents, seen_variables;
    u64 pc_base;
} S;

static const u64 POISON = 0x00f0000000000000u;  // where an unbound buffer seems to lie: nothing is ever mapped there

// ---- findings

static Finding *add(Lane *me, u32 kind, u32 slot, u64 pc, u64 offset, u64 size, u32 other_tid = ~0u, u32 other_group = 0, u64 other_pc = 0) {
    Checks *c = S.checks;
    for (u32 i = 0; i < c->findings; i++) {
        Finding *f = &c->finding[i];
        if (f->kind == kind && f->pc == pc && f->slot == slot && f->other_pc == other_pc) {
            f->count++;
            return f;
        }
    }
    c->total++;
    if (c->findings == c->max_findings) return nullptr;
    Finding *f = &c->finding[c->findings++];
    memset(f, 0, sizeof *f);
    f->kind = kind;
    f->slot = slot;
    f->pc = pc;
    f->other_pc = other_pc;
    f->offset = offset;
    f->size = size;
    f->tid = me->tid;
    f->group = me->tg->linear;
    f->other_tid = other_tid;
    f->other_group = other_group;
    f->count = 1;
    return f;
}

void report_failure(Worker *, Lane *me, u32 code, u32 a, u32 b) {
    static const u32 kinds[] = {0, COLLECTIVE_DIVERGED, BARRIER_DIVERGED, WAIT_FOR_EACH_OTHER, TOO_MUCH_THREADGROUP, NOT_BOUND, 0, 0};
    Finding *f = add(me, kinds[code], ~0u, (u64)a << 32 | b, 0, 0);
    if (f) { f->line = a; f->other_line = b; f->offset = a; f->size = b; f->pc = 0; }
}

static void add_lines(Lane *me, u32 kind, u32 line, u32 other_line, u32 other_tid) {
    Finding *f = add(me, kind, ~0u, (u64)line << 32 | other_line, 0, 0, other_tid, me->tg->linear);
    if (f) { f->line = line; f->other_line = other_line; }
}

// ---- barriers and collectives

static u32 some_other(Worker *w, u32 state, Lane *me) {
    for (u32 s = 0; s < w->tg.simdgroups; s++)
        for (u32 i = 0; i < SIMD && s * SIMD + i < w->tg.size; i++) {
            Lane *l = &w->lane[s * SIMD + i];
            if (l != me && l->state == state) return l->tid;
        }
    return ~0u;
}

void release_barrier(Worker *w) {
    Threadgroup *t = &w->tg;
    t->arrived = 0;
    t->generation++;
    if (t->flags & 2) t->barriers[0]++;
    if (t->flags & 1) t->barriers[1]++;
    if (w->checked) S.checks->barriers++;
}

void barrier_missed(Worker *w, Lane *me) {
    add_lines(me, BARRIER_MISSED, w->tg.site, 0, some_other(w, WAIT_GROUP, me));
    abandon(w);
}

void collective_missed(Worker *w, Lane *me) {
    add_lines(me, COLLECTIVE_MISSED, me->sg->site, 0, some_other(w, WAIT_SIMD, me));
    abandon(w);
}

extern "C" void msl_checked_barrier(Lane *me, u32 flags, Site site) {
    Worker *w = worker_of(me);
    Threadgroup *t = &w->tg;
    if (w->lockstep) step(me, site.pc);
    if (t->arrived == 0) {
        t->site = site.line;
        t->flags = flags;
    } else if (t->site != site.line) {
        msl_fail(me, DIVERGENT_BARRIER, t->site, site.line);
    }
    t->flags &= flags;
    if (w->checked && t->alive != t->size) {
        add_lines(me, BARRIER_MISSED, site.line, 0, some_other(w, DONE, me));
        abandon(w);
    }
    if (++t->arrived == t->alive) release_barrier(w);
    else msl_block(me, WAIT_GROUP, t->generation, site.line);
}

extern "C" void msl_collective_enter(Lane *me, Site site) {
    Worker *w = worker_of(me);
    if (w->lockstep) step(me, site.pc);
}

extern "C" void msl_collective_arrive(Lane *me, Site site, u32 count, u32 flags) {
    Worker *w = worker_of(me);
    Simdgroup *g = me->sg;
    const u32 p = g->generation & 1;
    if (g->arrived == 0) {
        g->mask[p] = g->ready[p] = 0;
        g->site = site.line;
        g->flags = flags;
        g->expected = w->lockstep ? g->released : g->alive;
    } else if (g->site != site.line) {
        msl_fail(me, DIVERGENT_SIMD, g->site, site.line);
    }
    g->flags &= flags;
    if (w->checked && !w->lockstep && g->alive != g->lanes) {
        add_lines(me, COLLECTIVE_MISSED, site.line, 0, some_other(w, DONE, me));
        abandon(w);
    }
    g->mask[p] |= 1u << me->lane;
    if (++g->arrived != g->expected) {
        msl_block(me, WAIT_SIMD, g->generation, site.line);
        return;
    }
    g->arrived = 0;
    g->generation++;
    if (count == COUNT_SIMD_BARRIER) {
        if (g->flags & 2) g->barriers[0]++;
        if (g->flags & 1) g->barriers[1]++;
    }
    if (w->checked) S.checks->collectives[count]++;
}

// ---- lockstep: a lane stops before every access; the lanes that are least advanced go on together

// Code is compiled so that addresses follow the order of the source: the lower address is the less advanced, except that
// within a loop the earlier iteration is.
static int compare(const Lane *a, const Lane *b) {
    const Progress *p = &worker_of(a)->progress[a->slot], *q = &worker_of(b)->progress[b->slot];
    for (u32 i = 0;; i++) {
        const bool more_a = i < a->depth, more_b = i < b->depth;
        const u64 x = more_a ? p->path[i] : a->pc, y = more_b ? q->path[i] : b->pc;
        if (x != y) return x < y ? -1 : 1;
        if (!more_a || !more_b) return (int)more_a - (int)more_b;
        if (p->iteration[i] != q->iteration[i]) return p->iteration[i] < q->iteration[i] ? -1 : 1;
    }
}

void step(Lane *me, u64 pc) {
    me->pc = pc;
    msl_block(me, WAIT_STEP, 0, me->site);
}

Lane *lockstep_release(Worker *w, u32 sg) {
    Lane *first = nullptr;
    const u32 n = w->tg.size - sg * SIMD < SIMD ? w->tg.size - sg * SIMD : SIMD;
    for (u32 i = 0; i < n; i++) {
        Lane *l = &w->lane[sg * SIMD + i];
        if (l->state == WAIT_STEP && (!first || compare(l, first) < 0)) first = l;
    }
    if (!first) return nullptr;
    u32 released = 0;
    for (u32 i = 0; i < n; i++) {
        Lane *l = &w->lane[sg * SIMD + i];
        if (l->state == WAIT_STEP && (l == first || compare(l, first) == 0)) {
            l->state = STEPPED;
            released++;
        }
    }
    w->sg[sg].released = released;
    return first;
}

// ---- memory

static void build_segments(const Launch *d, Checks *c) {
    u64 edge[6 * MAX_BUFFERS];
    u32 edges = 0;
    for (u32 i = 0; i < MAX_BUFFERS; i++) {
        const Binding *b = &c->binding[i];
        if (!d->length[i] || d->buffer[i] >= POISON) continue;
        const u64 all[] = {d->buffer[i], d->buffer[i] + d->length[i], b->start, b->end, b->writable_start, b->writable_end};
        for (u64 e : all)
            if (e >= all[0] && e <= all[1]) edge[edges++] = e;
    }
    for (u32 i = 1; i < edges; i++)
        for (u32 k = i; k && edge[k - 1] > edge[k]; k--) {
            const u64 t = edge[k];
            edge[k] = edge[k - 1];
            edge[k - 1] = t;
        }
    S.segments = 0;
    u64 cells = 0;
    for (u32 k = 0; k + 1 < edges; k++) {
        if (edge[k] == edge[k + 1]) continue;
        Segment s = {edge[k], edge[k + 1], ~0u, 0, 0, false, 0, nullptr, 0};
        for (u32 i = 0; i < MAX_BUFFERS; i++) {
            const Binding *b = &c->binding[i];
            if (!d->length[i] || s.start < d->buffer[i] || s.end > d->buffer[i] + d->length[i]) continue;
            s.bound = 1;
            u32 access = 0;
            if (s.start >= b->start && s.end <= b->end) access |= 1;
            if (s.start >= b->writable_start && s.end <= b->writable_end) access |= 2;
            if (s.slot == ~0u || (access & ~s.access)) s.slot = i;
            s.access |= access;
            if (access & 2) s.tracked = true;
            if (b->initialised) { s.initialised = b->initialised; s.initialised_from = b->initialised_from; }
        }
        if (!s.bound) continue;
        s.shadow = cells;
        if (s.tracked) cells += s.end - s.start;
        S.segment[S.segments++] = s;
    }
    if (cells > S.device_cells) {
        if (S.device) munmap(S.device, S.device_cells * sizeof(Cell));
        S.device_cells = cells * 2;
        S.device = (Cell *)mmap(nullptr, S.device_cells * sizeof(Cell), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (S.device == (Cell *)MAP_FAILED) { S.device = nullptr; S.device_cells = 0; }
    }
    if (!S.local) S.local = (Cell *)mmap(nullptr, ARENA * sizeof(Cell), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    memset(S.hint, 0, sizeof S.hint);
}

static Segment *find(u64 a, u64 pc) {
    u8 *hint = &S.hint[(pc >> 2) & 255];
    if (*hint < S.segments && a >= S.segment[*hint].start && a < S.segment[*hint].end) return &S.segment[*hint];
    for (u32 i = 0; i < S.segments; i++)
        if (a >= S.segment[i].start && a < S.segment[i].end) {
            *hint = (u8)i;
            return &S.segment[i];
        }
    return nullptr;
}

struct Access {
    Lane *me;
    u64 pc;
    bool write, atomic, read;  // an atomic update is both
    u32 group, space;  // space: 0 threadgroup memory, 1 device memory
};

// Was everything `tid` did at (epoch, step) finished, for this lane, before now?
static inline bool ordered(const Access &x, u32 group, u32 tid, u32 epoch, u32 step) {
    if (group != x.group) return false;
    if (tid == x.me->tid || epoch < x.me->tg->barriers[x.space ? 1 : 0]) return true;
    if (tid / SIMD != x.me->tid / SIMD) return false;
    return step < x.me->sg->barriers[x.space ? 1 : 0] || worker_of(x.me)->lockstep;
}

// Returns 0, or the kind of race; then *cell tells with whom.
static u32 touch(Cell *c, u32 stamp, const Access &x) {
    if (c->stamp != stamp) {
        c->stamp = stamp;
        c->flags = 0;
    }
    u32 race = 0;
    if ((c->flags & WRITTEN) && !(x.atomic && (c->flags & ATOMIC)) && !ordered(x, c->write_group, c->write_tid, c->write_epoch, c->write_step)) race = 1;
    if (x.write && (c->flags & READ) && !(x.atomic && (c->flags & ATOMIC_READ))) {
        bool before = ordered(x, c->read_group, c->read_tid, c->read_epoch, c->read_step);
        if (c->flags & MANY_GROUPS) before = false;
        else if (before && (c->flags & (MANY_LANES | MANY_SIMDGROUPS)) && c->read_epoch == x.me->tg->barriers[x.space ? 1 : 0]) {
            const bool stepped = c->read_step < x.me->sg->barriers[x.space ? 1 : 0] || worker_of(x.me)->lockstep;
            before = !(c->flags & MANY_SIMDGROUPS) && stepped && c->read_tid / SIMD == x.me->tid / SIMD;
        }
        if (!before) race = 2;
    }
    const u32 epoch = x.me->tg->barriers[x.space ? 1 : 0], step = x.me->sg->barriers[x.space ? 1 : 0];
    if (race) return race;
    if (x.write) {
        c->flags = (c->flags & ~(ATOMIC | READ | MANY_LANES | MANY_SIMDGROUPS | MANY_GROUPS | ATOMIC_READ)) | WRITTEN | (x.atomic ? ATOMIC : 0);
        c->write_group = x.group;
        c->write_tid = (u16)x.me->tid;
        c->write_epoch = epoch;
        c->write_step = step;
        c->write_pc = (u32)(x.pc - S.pc_base);
        if (!x.atomic) return 0;
    }
    // A reader: remember one, and whether there were others that no barrier has put into the past.
    u32 many = 0;
    if (c->flags & READ) {
        many = c->flags & (MANY_LANES | MANY_SIMDGROUPS | MANY_GROUPS);
        if (c->read_group != x.group) many |= MANY_GROUPS;
        else if (c->read_epoch != epoch) many &= MANY_GROUPS;
        else if (c->read_tid / SIMD != x.me->tid / SIMD) many |= MANY_SIMDGROUPS;
        else if (c->read_step != step) many &= MANY_GROUPS | MANY_SIMDGROUPS;
        else if (c->read_tid != x.me->tid) many |= MANY_LANES;
    }
    const bool plain = (c->flags & READ) && !(c->flags & ATOMIC_READ);
    c->flags = (c->flags & ~(MANY_LANES | MANY_SIMDGROUPS | MANY_GROUPS | ATOMIC_READ)) | READ | many | (x.atomic && !plain ? ATOMIC_READ : 0);
    c->read_group = x.group;
    c->read_tid = (u16)x.me->tid;
    c->read_epoch = epoch;
    c->read_step = step;
    c->read_pc = (u32)(x.pc - S.pc_base);
    return 0;
}

static void race_found(const Access &x, u32 race, const Cell *c, u32 slot, u64 offset, u64 size) {
    const bool by_write = race == 1;
    const u32 tid = by_write ? c->write_tid : c->read_tid, group = by_write ? c->write_group : c->read_group;
    const u64 pc = S.pc_base + (by_write ? c->write_pc : c->read_pc);
    u32 kind = x.space == 0 ? RACE_THREADGROUP : group == x.group ? RACE_DEVICE : RACE_GROUPS;
    Finding *f = add(x.me, kind, slot, x.pc, offset, size, tid, group, pc);
    if (f && f->count == 1) f->detail = (x.write ? 2 : 1) | (by_write ? 8 : 4);
}

static void count_bytes(u32 slot, u64 offset, u64 n, bool write) {
    Checks *c = S.checks;
    c->bytes[slot][write ? 1 : 0] += n;
    u8 *map = c->touched[slot][write ? 1 : 0];
    if (map)
        for (u64 i = offset; i < offset + n; i++) map[i >> 3] |= (u8)(1u << (i & 7));
}

[[noreturn]] static void stop(Lane *me) { abandon(worker_of(me)); }

static void local_access(Access &x, u64 a, u64 n) {
    Lane *me = x.me;
    Threadgroup *t = me->tg;
    for (int again = 0;; again++) {
        for (u32 i = 0; i < S.extents; i++) {
            if (a < S.extent[i].start || a + n > S.extent[i].end) continue;
            Cell *c = &S.local[a - (u64)t->arena];
            const u64 offset = a - S.extent[i].start;
            bool fresh = false;
            for (u64 k = 0; k < n; k++) fresh |= c[k].stamp != S.group_stamp || !(c[k].flags & WRITTEN);
            if (fresh && x.read) add(me, UNINITIALISED_THREADGROUP, S.extent[i].name, x.pc, offset, n);
            for (u64 k = 0; k < n; k++) {
                const u32 race = touch(&c[k], S.group_stamp, x);
                if (race) { race_found(x, race, &c[k], S.extent[i].name, offset, n); break; }
            }
            return;
        }
        if (again) break;
        for (; S.seen_variables < t->declared; S.seen_variables++) {  // declared since the last look
            const u32 v = S.seen_variables;
            if (!t->variable[v]) break;
            S.extent[S.extents++] = {(u64)t->variable[v], (u64)t->variable[v] + t->variable_size[v], 0x100 + v};
        }
    }
    u32 nearest = 0;
    u64 best = ~0ull;
    for (u32 i = 0; i < S.extents; i++) {
        const u64 away = a < S.extent[i].start ? S.extent[i].start - a : a - S.extent[i].start;
        if (away < best) { best = away; nearest = i; }
    }
    if (S.extents) add(me, x.write ? BEYOND_THREADGROUP_WRITE : BEYOND_THREADGROUP_READ, S.extent[nearest].name, x.pc, a - S.extent[nearest].start, n);
    else add(me, x.write ? BEYOND_THREADGROUP_WRITE : BEYOND_THREADGROUP_READ, ~0u, x.pc, 0, n);
    stop(me);
}

static void beyond(Access &x, u64 a, u64 n) {
    const Launch *d = S.launch;
    if (a >= POISON && a < POISON + ((u64)MAX_BUFFERS << 40)) {
        add(x.me, NOT_BOUND, (u32)((a - POISON) >> 40), x.pc, 0, n);
        stop(x.me);
    }
    u32 slot = ~0u;
    u64 best = ~0ull;
    for (u32 i = 0; i < MAX_BUFFERS; i++) {
        if (!d->length[i] || d->buffer[i] >= POISON) continue;
        const u64 end = d->buffer[i] + d->length[i], away = a < d->buffer[i] ? d->buffer[i] - a : a + n > end ? a + n - end : 0;
        if (away < best) { best = away; slot = i; }
    }
    add(x.me, x.write ? BEYOND_WRITE : BEYOND_READ, slot, x.pc, slot == ~0u ? a : a - d->buffer[slot], n);
    stop(x.me);
}

static void device_access(Access &x, u64 a, u64 n) {
    Segment *s = find(a, x.pc);
    if (!s) {
        // Not device memory: the kernel's own constants, or nothing at all.
        const Checks *c = S.checks;
        if (a >= c->image_start && a + n <= c->image_end) {
            if (x.write) { add(x.me, CONSTANT_WRITE, ~0u, x.pc, 0, n); stop(x.me); }
            return;
        }
        beyond(x, a, n);
        return;
    }
    if (a + n > s->end) {  // part of it belongs to the next segment, or to none
        const u64 here = s->end - a;
        device_access(x, a, here);
        device_access(x, a + here, n - here);
        return;
    }
    const u64 base = S.launch->buffer[s->slot], offset = a - base;
    if (!(s->access & (x.write ? 2 : 1))) add(x.me, x.write ? UNDECLARED_WRITE : UNDECLARED_READ, s->slot, x.pc, offset, n);
    if (s->initialised) {
        const u64 from = a - s->initialised_from;
        bool fresh = false;
        for (u64 i = from; i < from + n; i++) {
            if (x.read && !(s->initialised[i >> 3] >> (i & 7) & 1)) fresh = true;
            if (x.write) s->initialised[i >> 3] |= (u8)(1u << (i & 7));
        }
        if (fresh) add(x.me, UNINITIALISED_DEVICE, s->slot, x.pc, offset, n);
    }
    if (S.checks->count) count_bytes(s->slot, offset, n, x.write);
    if (!s->tracked || !S.device) return;
    Cell *c = &S.device[s->shadow + (a - s->start)];
    for (u64 k = 0; k < n; k++) {
        const u32 race = touch(&c[k], S.stamp, x);
        if (race) { race_found(x, race, &c[k], s->slot, offset, n); break; }
    }
}

static inline __attribute__((always_inline)) void access(const volatile void *p, u64 n, bool write, u64 pc, bool read, bool atomic = false) {
    Lane *me = current;
    if (__builtin_expect(!me, 0)) return;
    Worker *w = worker_of(me);
    const u64 a = (u64)p;
    if (a - (u64)w->stacks < (u64)STACK * MAX_LANES) return;  // thread memory
    const bool local = a - (u64)w->tg.arena < ARENA;
    if (w->lockstep && (local || find(a, pc) || !w->checked)) step(me, pc);
    if (!w->checked) return;
    Access x = {me, pc, write, atomic, read, w->tg.linear, local ? 0u : 1u};
    if (local) local_access(x, a, n);
    else device_access(x, a, n);
}

extern "C" void msl_checked_atomic(const volatile void *p, u32 size, u32 kind, Site site) {
    // kind: 0 load, 1 update, 2 store
    access(p, size, kind != 0, site.pc, kind != 2, true);
}

// ---- frames of a launch and of a threadgroup

void checks_begin_launch(const Launch *d, const RunOptions *) {
    S.launch = d;
    S.checks = d->checks;
    S.pc_base = d->checks->image_start;
    if (++S.stamp == 0) S.stamp = 1;
    build_segments(d, d->checks);
}
void checks_end_launch(const Launch *) {}
void checks_begin_group(Worker *w) {
    if (++S.group_stamp == 0) S.group_stamp = 1;
    S.extents = S.seen_variables = 0;
    const Launch *d = w->tg.launch;
    for (u32 i = 0; i < MAX_BUFFERS; i++)
        if (d->tg_length[i]) S.extent[S.extents++] = {(u64)w->tg.dynamic[i], (u64)w->tg.dynamic[i] + d->tg_length[i], 0x200 + i};
}
void checks_end_group(Worker *) {}

}  // namespace msl_rt

using namespace msl_rt;
#define CALLER ((u64)__builtin_return_address(0))
extern "C" {
#define MSL_TSAN(n)                                                                                 \
    MSL_EXPORT void __tsan_read##n(void *p) { access(p, n, false, CALLER, true); }                        \
    MSL_EXPORT void __tsan_write##n(void *p) { access(p, n, true, CALLER, false); }                        \
    MSL_EXPORT void __tsan_unaligned_read##n(void *p) { access(p, n, false, CALLER, true); }              \
    MSL_EXPORT void __tsan_unaligned_write##n(void *p) { access(p, n, true, CALLER, false); }              \
    MSL_EXPORT void __tsan_volatile_read##n(void *p) { access(p, n, false, CALLER, true); }               \
    MSL_EXPORT void __tsan_volatile_write##n(void *p) { access(p, n, true, CALLER, false); }               \
    MSL_EXPORT void __tsan_unaligned_volatile_read##n(void *p) { access(p, n, false, CALLER, true); }     \
    MSL_EXPORT void __tsan_unaligned_volatile_write##n(void *p) { access(p, n, true, CALLER, false); }     \
    MSL_EXPORT void __tsan_read_write##n(void *p) { access(p, n, false, CALLER, true); access(p, n, true, CALLER, false); } \
    MSL_EXPORT void __tsan_unaligned_read_write##n(void *p) { access(p, n, false, CALLER, true); access(p, n, true, CALLER, false); }
MSL_TSAN(1) MSL_TSAN(2) MSL_TSAN(4) MSL_TSAN(8) MSL_TSAN(16)
MSL_EXPORT void __tsan_read_range(void *p, unsigned long n) { if (n) access(p, n, false, CALLER, true); }
MSL_EXPORT void __tsan_write_range(void *p, unsigned long n) { if (n) access(p, n, true, CALLER, false); }
MSL_EXPORT void *__tsan_memcpy(void *d, const void *s, unsigned long n) {
    if (n) { access(s, n, false, CALLER, true); access(d, n, true, CALLER, false); }
    return memcpy(d, s, n);
}
MSL_EXPORT void *__tsan_memmove(void *d, const void *s, unsigned long n) {
    if (n) { access(s, n, false, CALLER, true); access(d, n, true, CALLER, false); }
    return memmove(d, s, n);
}
MSL_EXPORT void *__tsan_memset(void *d, int c, unsigned long n) {
    if (n) access(d, n, true, CALLER, false);
    return memset(d, c, n);
}
// Some compilers send atomics here too; msl_checked_atomic has checked them already.
#define MSL_ATOMIC(bits, T)                                                                                              \
    MSL_EXPORT T __tsan_atomic##bits##_load(const volatile T *p, int) { return __atomic_load_n(p, __ATOMIC_RELAXED); }   \
    MSL_EXPORT T __tsan_atomic##bits##_compare_exchange_val(volatile T *p, T old, T next, int, int) {                    \
        __atomic_compare_exchange_n(p, &old, next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);                          \
        return old;                                                                                                     \
    }                                                                                                                   \
    MSL_EXPORT int __tsan_atomic##bits##_compare_exchange_strong(volatile T *p, T *old, T next, int, int) {             \
        return __atomic_compare_exchange_n(p, old, next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);                    \
    }
MSL_ATOMIC(8, u8) MSL_ATOMIC(32, u32) MSL_ATOMIC(64, u64)
MSL_EXPORT void __tsan_init() {}
MSL_EXPORT void __tsan_vptr_update(void **, void *) {}
MSL_EXPORT void __tsan_vptr_read(void **) {}
static void push(u64 pc) {
    Lane *me = current;
    if (!me) return;
    if (me->depth == MAX_DEPTH) msl_fail(me, TOO_DEEP, MAX_DEPTH, 0);
    Progress *p = &worker_of(me)->progress[me->slot];
    p->path[me->depth] = pc;
    p->iteration[me->depth++] = 0;
}
static void pop() {
    if (current && current->depth) current->depth--;
}
MSL_EXPORT void __tsan_func_entry(void *caller) { push((u64)caller); }
MSL_EXPORT void __tsan_func_exit() { pop(); }
namespace msl_rt {
MSL_EXPORT void msl_loop_enter(u64 pc) { push(pc); }
MSL_EXPORT void msl_loop_next() { worker_of(current)->progress[current->slot].iteration[current->depth - 1]++; }
MSL_EXPORT void msl_loop_leave() { pop(); }
}

// Undefined-behaviour checks whose handlers are ours: alignment, array bounds, division by zero.
struct Place { const char *file; u32 line, column; };
static void undefined(u32 kind, const Place *at, u64 pc, u64 a, u64 b) {
    Lane *me = current;
    if (!me) return;
    Worker *w = worker_of(me);
    if (!w->checked) return;
    u32 slot = ~0u;
    u64 offset = b;
    if (kind == MISALIGNED) {
        Segment *s = find(a, pc);
        if (s) { slot = s->slot; offset = a - S.launch->buffer[s->slot]; }
        else if (a >= POISON && a < POISON + ((u64)MAX_BUFFERS << 40)) { kind = NOT_BOUND; slot = (u32)((a - POISON) >> 40); }
    }
    Finding *f = add(me, kind, slot, pc, offset, kind == MISALIGNED ? b : a);
    if (f && f->count == 1) {
        f->file = (u64)at->file;
        f->line = at->line;
    }
    abandon(w);
}
namespace msl_rt {
MSL_EXPORT void msl_misaligned(const volatile void *p, u32 alignment, Site site) {
    const Place at = {nullptr, site.line, 0};
    undefined(MISALIGNED, &at, site.pc, (u64)p, alignment);
}
}
MSL_EXPORT void __ubsan_handle_type_mismatch_v1(void *data, unsigned long p) {
    undefined(MISALIGNED, (Place *)data, CALLER, p, 1u << *((u8 *)data + sizeof(Place) + sizeof(void *)));
}
MSL_EXPORT void __ubsan_handle_out_of_bounds(void *data, unsigned long index) { undefined(INDEX, (Place *)data, CALLER, index, index); }
MSL_EXPORT void __ubsan_handle_divrem_overflow(void *data, unsigned long l, unsigned long) { undefined(DIVISION, (Place *)data, CALLER, l, l); }
}
