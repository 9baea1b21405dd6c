#include "msl_host.h"
namespace msl_rt {
struct Checks { u64 x; };
void report_failure(Worker *, Lane *, u32, u32, u32) {}
void barrier_missed(Worker *, Lane *) {}
void release_barrier(Worker *w) { w->tg.arrived = 0; w->tg.generation++; }
Lane *lockstep_release(Worker *, u32) { return nullptr; }
void checks_begin_launch(const Launch *, const RunOptions *) {}
void checks_end_launch(const Launch *) {}
void checks_begin_group(Worker *) {}
void checks_end_group(Worker *) {}
}
