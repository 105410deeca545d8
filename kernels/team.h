// Threads of our own. A region is a function that the caller and each worker that comes meanwhile
// call at the same time; it takes its work from a counter. When the caller finds no more, it closes
// the door and waits for those inside, never for a thread that has not come: another program may
// have its core. (OpenMP waits for all, 200 times in a token.) Who does what changes no result.
#pragma once
#include <algorithm>
#include <atomic>
#include <utility>
#ifdef ONE_THREAD  // build.py: the compiler knows no others
#define THREADS ", one thread"
static struct {
  uint64_t limit;
  template <class F> void run(int, const F &f) { f(); }
} team;
#else
#define THREADS ""
#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <chrono>
#include <condition_variable>
#include <exception>

struct Team {
  using Clock = std::chrono::steady_clock;  // to look at it is a pause, too
  using Duration = Clock::duration;
  static constexpr std::chrono::microseconds SPIN{50}, LONG_SPIN{3000}, LOST{200};
  static constexpr std::chrono::microseconds ALONE{1000}, LONGEST{64000}, CAREFUL{1000000};
  static constexpr int STACK = 128 << 10;
  // How many workers are inside, may still come in (the door is open while there are seats), and
  // sleep. All in one number, so that nobody falls asleep beside an open door:
  //   bits  63 ... 40 | 39 ... 20 | 19 ... 0
  //         sleepers  | seats     | inside
  static constexpr uint64_t INSIDE = 1, SEAT = 1 << 20, SLEEPER = 1ull << 40,
                            SEATS = SLEEPER - SEAT;
  alignas(64) std::atomic<uint64_t> gate{0};
  alignas(64) void (*call)(const void *) = nullptr;  // of the region that the door leads to
  const void *function = nullptr;
  std::atomic<bool> busy{false};
  std::mutex bed;
  std::condition_variable alarm;
  std::exception_ptr error;                // the first in this region
  uint64_t calls = 0, workers = 0, limit;  // each sleeper answers a call; the most workers
  // Workers spin for SPIN; longer if the last pause between regions was one that they could have
  // spun through, but not for a while after a thread has lost its core: spinning had part in it.
  std::atomic<Duration> spin{SPIN};
  std::atomic<bool> lost{false};  // a worker has, while it was spinning
  Clock::time_point alone_until{}, careful_until{}, ended{};
  Duration alone{0}, careful{0};
  explicit Team(uint64_t limit) : limit(limit) {}

  void attempt() {
    try {
      call(function);
    } catch (...) {
      std::unique_lock<std::mutex> lock(bed);
      if (!error) error = std::current_exception();
      gate.fetch_and(~SEATS, std::memory_order_relaxed);
    }
  }
  void sleep() {
    std::unique_lock<std::mutex> lock(bed);
    uint64_t g = gate.load(std::memory_order_relaxed);
    do
      if (g & SEATS) return;
    while (!gate.compare_exchange_weak(g, g + SLEEPER, std::memory_order_relaxed));
    alarm.wait(lock, [this] { return calls > 0; });
    calls--;
  }
  void work() {
#ifndef _WIN32
    sigset_t others;  // signals are for Python's threads, but for faults
    sigfillset(&others);
    for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&others, fault);
    pthread_sigmask(SIG_SETMASK, &others, nullptr);
#endif
    for (auto now = Clock::now(), until = now + SPIN;;) {
      uint64_t g = gate.load(std::memory_order_relaxed);
      if (g & SEATS) {
        if (!gate.compare_exchange_weak(g, g - SEAT + INSIDE, std::memory_order_acquire)) continue;
        attempt();
        gate.fetch_sub(INSIDE, std::memory_order_release);
      } else {
        const auto last = std::exchange(now, Clock::now());
        if (now - last > LOST) lost.store(true, std::memory_order_relaxed);
        if (now < until) continue;
        sleep();
      }
      now = Clock::now(), until = now + spin.load(std::memory_order_relaxed);
    }
  }
  void hire(uint64_t wanted) {
    pthread_attr_t small;
    pthread_attr_init(&small), pthread_attr_setstacksize(&small, STACK);
    auto start = [](void *team) -> void * { return ((Team *)team)->work(), nullptr; };
    pthread_t thread;
    while (workers < wanted && !pthread_create(&thread, &small, start, this))
      pthread_detach(thread), workers++;
    if (workers < wanted) limit = workers;  // the system starts no more
    pthread_attr_destroy(&small);
  }
  void open(uint64_t seats) {
    uint64_t g = gate.load(std::memory_order_relaxed), woken;
    do woken = std::max(seats + g / SLEEPER, workers) - workers;  // so many more than are awake
    while (!gate.compare_exchange_weak(g, g + seats * SEAT - woken * SLEEPER,
                                       std::memory_order_release, std::memory_order_relaxed));
    if (!woken) return;
    std::unique_lock<std::mutex>{bed}, calls += woken;
    while (woken--) alarm.notify_one();
  }
  // Before a region: whether workers are to spin longer after it
  void learn(Clock::time_point start) {
    if (lost.load(std::memory_order_relaxed)) {
      lost.store(false, std::memory_order_relaxed);
      if (start - careful_until > 4 * careful) careful /= 4;
      careful = std::clamp<Duration>(2 * careful, LONGEST, CAREFUL);
      careful_until = start + careful;
    }
    const Duration pause = start - ended, old = spin.load(std::memory_order_relaxed);
    if (start >= careful_until && pause < SPIN) return;
    const bool longer = start >= careful_until && pause < LONG_SPIN;
    const Duration wanted = longer ? LONG_SPIN : SPIN;
    if (wanted != old) spin.store(wanted, std::memory_order_relaxed);
  }
  void close(Clock::time_point start) {
    if (!(gate.fetch_and(~SEATS, std::memory_order_acquire) % SEAT)) return;
    const auto done = Clock::now();
    auto end = done;
    for (; gate.load(std::memory_order_acquire) % SEAT; end = Clock::now())
      if (end - done > SPIN) sched_yield();
    if (end - done > LOST) lost.store(true, std::memory_order_relaxed);
    if (end - done < std::max<Duration>(SPIN, done - start)) return;
    // A worker has lost its core in the midst of its share. If that took longer than workers can
    // have saved since they were last left out, they are left out for twice as long.
    if (2 * (end - done) < start - alone_until) alone /= 2;
    else alone = std::clamp<Clock::duration>(2 * alone, ALONE, LONGEST);
    alone_until = end + alone;
  }
  void run(int threads, void (*f)(const void *), const void *with) {
    if (threads < 2 || busy.exchange(true, std::memory_order_acquire)) return f(with);
    const auto start = Clock::now();
    const uint64_t seats = start < alone_until ? 0 : std::min<uint64_t>(threads - 1, limit);
    if (workers < seats) hire(seats);
    learn(start);
    call = f, function = with;
    open(std::min(seats, workers));
    attempt();
    close(start);
    ended = Clock::now();
    const std::exception_ptr first = std::exchange(error, nullptr);
    busy.store(false, std::memory_order_release);
    if (first) std::rethrow_exception(first);
  }
  // f() by the caller and up to threads - 1 workers; what is thrown first is thrown here
  template <class F> void run(int threads, const F &f) {
    run(threads, [](const void *f) { (*(const F *)f)(); }, &f);
  }
};
static Team &team = *new Team(0);  // for ever: when the process exits, workers still use it
#ifndef _WIN32  // a child has this thread only
static const int forks = pthread_atfork(nullptr, nullptr, [] { new (&team) Team(team.limit); });
#endif
#endif

// f(i) for all i below n, by up to so many threads, each of which takes its share of what is left
template <class F> static void for_all(int64_t n, int threads, const F &f) {
  alignas(64) std::atomic<int64_t> next(0);
  team.run(threads, [&] {
    for (int64_t i = next.load(std::memory_order_relaxed), end; i < n;) {
      end = std::min(n, i + std::max((n + 255) / 256, (n - i + threads - 1) / threads));
      if (!next.compare_exchange_weak(i, end, std::memory_order_relaxed)) continue;
      for (; i < end; i++) f(i);
      i = next.load(std::memory_order_relaxed);
    }
  });
}
