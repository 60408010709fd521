// What the parts of the surrogate share: see surrogate.cpp.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <limits>
#include <list>
#include <queue>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace surrogate {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kClose = 1e-6;  // of a step: rounding
constexpr int kNoVersion = std::numeric_limits<int>::max();
constexpr int kParts = 6;
enum Preset { kSync, kSyncPlus, kOneOff, kStartBound, kRollart };
enum Part { kGenerate, kTrain, kReset, kStep, kReward, kWeights };
enum What { kTurns, kPrompt, kObservation, kResponse, kResetTime, kStepTime, kRewardTime, kQuantities };

// Random numbers by what they are for, so that all schedules and parameters meet the same trajectories.
inline uint64_t mixed_bits(uint64_t x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

inline double random_share(uint64_t seed, uint64_t what, uint64_t turn) {
    return ((mixed_bits(mixed_bits(mixed_bits(seed) + what) + turn) >> 11) + 0.5) / 9007199254740992.0;
}

// The quantile function at even shares.
struct Quantity {
    std::vector<double> values;

    double operator()(double share) const {
        double at = share * values.size() - 0.5;
        if (at <= 0) return values.front();
        size_t below = static_cast<size_t>(at);
        if (below + 1 >= values.size()) return values.back();
        return values[below] + (values[below + 1] - values[below]) * (at - below);
    }
};

struct Task {
    double window, pool, max_tokens, max_turns, max_context;
    Quantity draws[kQuantities];
};

struct Settings {
    double preset, alpha, groups, group_size, spare, processes, steps, warmup, scoring, exposed, push, pull, stops;
    double install_first, one_in, train_token, train_square, train_moved, train_fixed, seed, sample;
};

// Costs of passes, as in rollart/simulator/pass_cost.py.
struct PassCost {
    double fixed, weights, kv, token, attend, sequence, reduce, kv_tokens, max_batch, chunk;

    std::pair<double, double> decode(int batch, double context) const {
        double around = fixed + batch * (reduce + sequence), computed = batch * token;
        if (computed + context * attend > weights + context * kv) return {around + computed, attend};
        return {around + weights, kv};
    }

    double pass(double tokens, double attended, double read, double passes, int batch, double context,
                int prompts) const {
        double around = passes * (fixed + batch * sequence) + prompts * sequence + (tokens + passes * batch) * reduce;
        double computed = (tokens + passes * batch) * token + (attended + passes * context) * attend;
        return around + std::max(computed, passes * (weights + context * kv) + read * kv);
    }
};

struct Sequence {
    int trajectory = 0, order = 0;
    double length = 0, fresh = 0, target = 0, made = 0, base = 0, joined = 0;
    bool decoding = false, cancelled = false, whole = true;
};

class Simulation;

class Engine {
public:
    Engine(Simulation& simulation, int number, int pool, PassCost cost)
        : number(number), pool(pool), simulation_(simulation), cost_(cost) {}

    int number, pool, version = 0, open = 0;
    uint32_t timer = 0;
    double busy = 0;

    void add(int trajectory, double length, double whole, double prompt, double target, int group);
    void cancel(int trajectory);
    void swap(double seconds, int version);
    void wake();

private:
    enum Phase { kDecode, kPrefill, kSwap, kRecompute };
    struct End {
        double step;
        int order;
        Sequence* sequence;
        bool operator<(const End& other) const { return step > other.step; }
        bool active() const { return sequence->decoding && sequence->order == order; }
    };

    Simulation& simulation_;
    PassCost cost_;
    Phase phase_ = kDecode;
    double phase_end_ = 0, rate_ = 0, at_ = 0, context_ = 0, steps_ = 0, standstill_ = -1, cached_ = 0;
    int count_ = 0, order_ = 0, next_version_ = 0;
    bool recompute_ = false;
    std::deque<Sequence*> waiting_;
    std::vector<Sequence*> group_;
    std::priority_queue<End> ends_;
    std::vector<End> joined_;
    std::deque<Sequence> all_;
    std::vector<Sequence*> unused_;
    std::unordered_map<int, Sequence*> of_;
    std::list<std::pair<int, double>> conversations_;
    std::unordered_map<int, std::list<std::pair<int, double>>::iterator> where_;
    std::unordered_set<int> prompts_;

    void advance();
    void schedule();
    void begin();
    void begin_prefill();
    void end_phase();
    void join(Sequence* sequence);
    void leave(Sequence* sequence);
    void finish(Sequence* sequence);
    void preempt();
    void evict(double limit);
    double take_cached(int conversation);
    bool has_prompt(int group) { return !prompts_.insert(group).second; }
};

struct Trajectory {
    enum State {
        kQueued, kResetting, kToGenerate, kGenerating, kStuck, kToStep, kStepping, kToScore, kScoring, kEnded
    };
    int task = 0, group = 0, turns = 0, turn = 0, engine = -1, engine_version = 0;
    State state = kQueued;
    uint64_t seed = 0;
    double context = 0, prompt = 0;
    bool in_environment = false;
};

struct Group {
    int task = 0, number = 0, oldest = kNoVersion;
    bool closed = false, ready = false;
    std::vector<int> members;
    std::vector<double> lengths;
};

class Simulation {
public:
    Simulation(const double*& in);
    void run(double* out);

    double now = 0;
    void wake_engine(double when, Engine& engine) { post(when, kEngine, engine.number, engine.timer); }
    void first_token(int trajectory, int version);
    void generated(int trajectory, double tokens);
    void engine_loaded();

private:
    enum Kind { kEngine, kResetDone, kStepDone, kScored, kTrainBegin, kTrained, kSwapBegin, kSample };
    struct Event {
        double time;
        uint64_t number;
        Kind kind;
        int id;
        uint32_t timer;
        bool operator<(const Event& other) const {
            return time > other.time || (time == other.time && number > other.number);
        }
    };

    Settings set_;
    std::vector<Task> tasks_;
    std::deque<Engine> engines_;
    std::deque<Trajectory> trajectories_;
    std::deque<Group> groups_;
    std::priority_queue<Event> events_;
    uint64_t posted_ = 0;
    int pools_ = 0, next_ = 0, serving_ = 0, running_ = 0, scoring_ = 0, resetting_ = 0, stepping_ = 0, in_use_ = 0;
    bool training_ = false, wants_batch_ = true, wants_swap_ = false;
    std::vector<std::deque<int>> open_, queued_, barrier_;
    std::vector<int> ready_, started_, used_, members_;
    std::vector<int> stuck_, late_;
    std::deque<int> to_score_;
    double free_at_ = 0, pushed_at_ = 0, train_s_ = 0, batch_tokens_ = 0;
    int steps_ = 0;
    double measured_from_ = 0, last_step_ = 0, tokens_ = 0, trained_s_ = 0, samples_ = 0, parts_[kParts] = {};
    std::vector<double> busy_;

    bool one_batch() const { return set_.preset <= kOneOff; }
    int alpha() const;
    int quota(size_t task, int batch) const;
    void post(double when, Kind kind, int id, uint32_t timer = 0) { events_.push({when, posted_++, kind, id, timer}); }
    double draw(const Trajectory& each, What what) const {
        return tasks_[each.task].draws[what](random_share(each.seed, what, each.turn));
    }
    void handle(const Event& event);
    void admit();
    void start_group(int task);
    void claim(int id);
    void release(int id);
    void wait_for_others(int id, Trajectory::State state);
    void open_barrier(int task);
    void to_generate(int id);
    void generate(int id);
    void to_step(int id);
    void stepped(int id);
    void episode_over(int id);
    void score(int id);
    void scored(int id);
    void cancel(int id);
    void drop(int id);
    void take_batch();
    void train(const std::vector<int>& batch);
    void trained();
    void begin_swap_if_idle();
    void sample();
};

}  // namespace surrogate
