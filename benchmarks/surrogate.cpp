// A coarse copy of rollart's simulator, for fits that need thousands of simulations: see surrogate.py.
//
// It has the simulator's engines (continuous batching from event to event, chunks of prefill, cached KV, preemption,
// swaps of weights), its environments and rewards, and of the control plane what the paper's scenarios use: presets,
// the staleness bound, groups with spare members, tags for pools. It leaves out failures, hedges, experts, elastic
// batches and pairs. Numbers come in and go out as flat arrays, in the order in which `run_surrogate` reads them.

#include "surrogate.h"

namespace surrogate {

double take(const double*& in) { return *in++; }

Simulation::Simulation(const double*& in) {
    double* fields = reinterpret_cast<double*>(&set_);
    for (size_t i = 0; i < sizeof(Settings) / sizeof(double); ++i) fields[i] = take(in);
    pools_ = static_cast<int>(take(in));
    for (int pool = 0; pool < pools_; ++pool) {
        int engines = static_cast<int>(take(in));
        PassCost cost;
        double* costs = reinterpret_cast<double*>(&cost);
        for (size_t i = 0; i < sizeof(PassCost) / sizeof(double); ++i) costs[i] = take(in);
        for (int i = 0; i < engines; ++i) engines_.emplace_back(*this, static_cast<int>(engines_.size()), pool, cost);
    }
    tasks_.resize(static_cast<size_t>(take(in)));
    for (Task& task : tasks_) {
        task.window = take(in), task.pool = take(in), task.max_tokens = take(in), task.max_turns = take(in);
        task.max_context = take(in);
        for (Quantity& quantity : task.draws) {
            size_t count = static_cast<size_t>(take(in));
            quantity.values.assign(in, in + count);
            in += count;
        }
    }
    size_t count = tasks_.size();
    open_.resize(count), queued_.resize(count), barrier_.resize(count);
    ready_.assign(count, 0), started_.assign(count, 0), used_.assign(count, 0), members_.assign(count, 0);
    busy_.assign(pools_, 0);
}

void Simulation::run(double* out) {
    admit();
    if (set_.sample > 0) post(0, kSample, 0);
    while (!events_.empty() && steps_ < set_.steps) {
        Event event = events_.top();
        events_.pop();
        now = event.time;
        handle(event);
    }
    double steps = steps_ - set_.warmup, seconds = last_step_ - measured_from_;
    for (const Engine& engine : engines_) busy_[engine.pool] += engine.busy;
    *out++ = seconds / steps;
    *out++ = tokens_ / seconds;
    *out++ = trained_s_ / steps;
    for (double part : parts_) *out++ = samples_ ? part / samples_ : 0;
    for (int pool = 0; pool < pools_; ++pool) {
        double engines = 0;
        for (const Engine& engine : engines_) engines += engine.pool == pool;
        *out++ = busy_[pool] / seconds / engines;
    }
}

void Simulation::handle(const Event& event) {
    bool ended = event.kind >= kResetDone && event.kind <= kScored &&
                 trajectories_[event.id].state == Trajectory::kEnded;
    switch (event.kind) {
        case kEngine:
            if (engines_[event.id].timer == event.timer) engines_[event.id].wake();
            break;
        case kResetDone:
            if (ended) break;
            --resetting_;
            trajectories_[event.id].context = trajectories_[event.id].prompt;
            to_generate(event.id);
            break;
        case kStepDone:
            if (!ended) stepped(event.id);
            break;
        case kScored:
            if (!ended) scored(event.id);
            break;
        case kTrainBegin:
            training_ = true;
            break;
        case kTrained:
            trained();
            break;
        case kSwapBegin:
            for (Engine& engine : engines_) engine.swap(set_.exposed, event.id);
            break;
        case kSample:
            sample();
            post(now + set_.sample, kSample, 0);
            break;
    }
}

int Simulation::alpha() const {
    if (set_.preset <= kSyncPlus) return 0;
    return set_.preset == kOneOff ? 1 : static_cast<int>(set_.alpha);
}

int Simulation::quota(size_t task, int batch) const {
    int count = static_cast<int>(tasks_.size()), groups = static_cast<int>(set_.groups);
    return groups / count + ((static_cast<int>(task) + batch) % count < groups % count);
}

void Simulation::admit() {
    int last = serving_ + alpha();
    if (one_batch()) last = std::min(last, next_);
    for (size_t task = 0; task < tasks_.size(); ++task) {
        size_t limit = 0;
        for (int batch = next_; batch <= last; ++batch) limit += quota(task, batch);
        while (open_[task].size() < limit) start_group(static_cast<int>(task));
    }
}

void Simulation::start_group(int task) {
    int id = static_cast<int>(groups_.size());
    Group& group = groups_.emplace_back();
    group.task = task;
    group.number = started_[task]++;
    open_[task].push_back(id);
    int members = static_cast<int>(set_.group_size + (set_.preset == kRollart ? set_.spare : 0));
    for (int member = 0; member < members; ++member) {
        int number = static_cast<int>(trajectories_.size());
        Trajectory& each = trajectories_.emplace_back();
        each.task = task;
        each.group = id;
        each.seed = mixed_bits(static_cast<uint64_t>(set_.seed) * 1009 + task) + 4096ull * group.number + member;
        group.members.push_back(number);
        ++running_;
        if (used_[task] < set_.processes)
            claim(number);
        else
            queued_[task].push_back(number);
    }
}

void Simulation::claim(int id) {
    Trajectory& each = trajectories_[id];
    ++used_[each.task], ++in_use_, ++resetting_;
    each.in_environment = true;
    if (set_.preset == kSync) ++members_[each.task];
    each.state = Trajectory::kResetting;
    each.turns = std::max(1, static_cast<int>(std::min(tasks_[each.task].max_turns, std::round(draw(each, kTurns)))));
    double share = random_share(static_cast<uint64_t>(set_.seed), kPrompt, groups_[each.group].number);
    each.prompt = std::max(1.0, std::round(tasks_[each.task].draws[kPrompt](share)));
    post(now + draw(each, kResetTime), kResetDone, id);
}

void Simulation::release(int id) {
    Trajectory& each = trajectories_[id];
    if (!std::exchange(each.in_environment, false)) return;
    int task = each.task;
    --in_use_, --used_[task];
    if (set_.preset == kSync) {
        --members_[task];
        open_barrier(task);
    }
    while (!queued_[task].empty() && used_[task] < set_.processes) {
        int first = queued_[task].front();
        queued_[task].pop_front();
        if (trajectories_[first].state == Trajectory::kQueued) claim(first);
    }
}

void Simulation::wait_for_others(int id, Trajectory::State state) {
    trajectories_[id].state = state;
    barrier_[trajectories_[id].task].push_back(id);
    open_barrier(trajectories_[id].task);
}

void Simulation::open_barrier(int task) {
    if (barrier_[task].empty() || static_cast<int>(barrier_[task].size()) < members_[task]) return;
    for (int id : std::exchange(barrier_[task], {})) {
        if (trajectories_[id].state == Trajectory::kToGenerate) generate(id);
        else if (trajectories_[id].state == Trajectory::kToStep) to_step(id);
    }
}

void Simulation::to_generate(int id) {
    if (set_.preset == kSync) wait_for_others(id, Trajectory::kToGenerate);
    else generate(id);
}

// On the engine that has its KV, or on the one with the fewest requests in the pool of its tag.
void Simulation::generate(int id) {
    Trajectory& each = trajectories_[id];
    const Task& task = tasks_[each.task];
    double target = std::min(task.max_tokens, std::max(1.0, std::round(draw(each, kResponse))));
    double length = each.context;
    if (task.window > 0) length = std::min(length, each.prompt + std::round(task.window));
    int floor = one_batch() ? 0 : std::max(next_ - alpha(), serving_);
    Engine* best = nullptr;
    if (each.engine >= 0 && engines_[each.engine].version == each.engine_version && each.engine_version >= floor) {
        best = &engines_[each.engine];
    } else {
        for (Engine& engine : engines_) {
            bool allowed = (pools_ == 1 || engine.pool == task.pool) && engine.version >= floor;
            if (allowed && (!best || engine.open < best->open)) best = &engine;
        }
    }
    each.state = best ? Trajectory::kGenerating : Trajectory::kStuck;
    if (!best) {
        stuck_.push_back(id);
        return;
    }
    each.engine = best->number;
    each.engine_version = best->version;
    best->add(id, length, each.context, each.prompt, target, each.group);
}

void Simulation::first_token(int trajectory, int version) {
    Group& group = groups_[trajectories_[trajectory].group];
    if (version >= group.oldest) return;
    group.oldest = version;
    if (!group.closed && set_.preset == kRollart && next_ - version > alpha()) {
        drop(trajectories_[trajectory].group);
        admit();
    }
}

void Simulation::generated(int id, double tokens) {
    trajectories_[id].context += tokens;
    if (set_.preset == kSync) wait_for_others(id, Trajectory::kToStep);
    else to_step(id);
}

void Simulation::to_step(int id) {
    trajectories_[id].state = Trajectory::kStepping;
    ++stepping_;
    post(now + std::max(0.0, draw(trajectories_[id], kStepTime)), kStepDone, id);
}

void Simulation::stepped(int id) {
    Trajectory& each = trajectories_[id];
    const Task& task = tasks_[each.task];
    --stepping_;
    bool over = ++each.turn >= each.turns;
    if (!over) {
        double observed = std::max(1.0, std::round(draw(each, kObservation)));
        over = each.context + observed > task.max_context - task.max_tokens;
        if (!over) each.context += observed;
    }
    if (over) episode_over(id);
    else to_generate(id);
}

void Simulation::episode_over(int id) {
    trajectories_[id].state = Trajectory::kToScore;
    release(id);
    if (set_.preset != kSync) {
        score(id);
        return;
    }
    late_.push_back(id);  // rewards wait for the last of the batch
    if (static_cast<int>(late_.size()) == running_)
        for (int each : std::exchange(late_, {})) score(each);
}

void Simulation::score(int id) {
    if (scoring_ >= set_.scoring) {
        to_score_.push_back(id);
        return;
    }
    ++scoring_;
    trajectories_[id].state = Trajectory::kScoring;
    post(now + draw(trajectories_[id], kRewardTime), kScored, id);
}

void Simulation::scored(int id) {
    Trajectory& each = trajectories_[id];
    Group& group = groups_[each.group];
    --scoring_, --running_;
    each.state = Trajectory::kEnded;
    while (!to_score_.empty() && scoring_ < set_.scoring) {
        int first = to_score_.front();
        to_score_.pop_front();
        if (trajectories_[first].state == Trajectory::kToScore) score(first);
    }
    if (!group.closed && !group.ready) {
        group.lengths.push_back(each.context);
        if (group.lengths.size() == set_.group_size) {
            group.ready = true;
            ++ready_[group.task];
            for (int member : group.members) cancel(member);
            take_batch();
        }
    }
    begin_swap_if_idle();
}

void Simulation::cancel(int id) {
    Trajectory& each = trajectories_[id];
    Trajectory::State state = std::exchange(each.state, Trajectory::kEnded);
    if (state == Trajectory::kEnded) return;
    --running_;
    resetting_ -= state == Trajectory::kResetting;
    stepping_ -= state == Trajectory::kStepping;
    scoring_ -= state == Trajectory::kScoring;
    if (state == Trajectory::kGenerating) engines_[each.engine].cancel(id);
    release(id);
}

void Simulation::drop(int id) {
    Group& group = groups_[id];
    group.closed = true;
    auto& open = open_[group.task];
    open.erase(std::find(open.begin(), open.end(), id));
    ready_[group.task] -= group.ready;
    for (int member : group.members) cancel(member);
}

// Of each task the first ready groups among those that started first.
void Simulation::take_batch() {
    if (!wants_batch_) return;
    admit();
    double window = one_batch() ? 1 : set_.preset == kStartBound ? set_.alpha + 1 : 2;
    std::vector<int> batch;
    for (size_t task = 0; task < tasks_.size(); ++task) {
        int need = quota(task, next_), found = 0;
        if (ready_[task] < need) return;
        size_t reach = std::min(open_[task].size(), static_cast<size_t>(need * window));
        for (size_t i = 0; i < reach && found < need; ++i) {
            if (!groups_[open_[task][i]].ready) continue;
            batch.push_back(open_[task][i]);
            ++found;
        }
        if (found < need) return;
    }
    wants_batch_ = false;
    train(batch);
}

void Simulation::train(const std::vector<int>& batch) {
    double tokens = 0, squares = 0;
    for (int id : batch) {
        Group& group = groups_[id];
        group.closed = true;
        auto& open = open_[group.task];
        open.erase(std::find(open.begin(), open.end(), id));
        --ready_[group.task];
        for (double length : group.lengths) tokens += length, squares += length * length;
    }
    ++next_;
    if (set_.preset == kRollart) {
        std::vector<int> stale;
        for (auto& open : open_)
            for (int id : open)
                if (groups_[id].oldest != kNoVersion && next_ - groups_[id].oldest > alpha()) stale.push_back(id);
        for (int id : stale) drop(id);
    }
    admit();
    batch_tokens_ = tokens * set_.one_in;
    double computed = set_.train_token * batch_tokens_ + set_.train_square * squares * set_.one_in;
    train_s_ = std::max(computed, set_.train_moved * batch_tokens_) + set_.train_fixed;
    double begin = std::max(now, free_at_);
    post(begin, kTrainBegin, 0);
    post(begin + train_s_, kTrained, 0);
}

void Simulation::trained() {
    training_ = false;
    last_step_ = now;
    if (++steps_ > set_.warmup) {
        tokens_ += batch_tokens_;
        trained_s_ += train_s_;
    } else {
        measured_from_ = now;
        samples_ = 0;
        std::fill(parts_, parts_ + kParts, 0.0);
        std::fill(busy_.begin(), busy_.end(), 0.0);
        for (const Engine& engine : engines_) busy_[engine.pool] -= engine.busy;
    }
    if (set_.stops) {
        free_at_ = now + set_.exposed;
    } else {
        pushed_at_ = std::max(now, pushed_at_) + set_.push;
        if (set_.install_first) free_at_ = pushed_at_ + set_.exposed;
    }
    if (one_batch()) {
        wants_swap_ = true;
        begin_swap_if_idle();
    } else {
        post(set_.stops ? now : std::max(pushed_at_, now + set_.pull - set_.exposed), kSwapBegin, next_);
    }
    wants_batch_ = true;
    take_batch();
}

void Simulation::begin_swap_if_idle() {
    if (!wants_swap_ || running_) return;
    wants_swap_ = false;
    post(now, kSwapBegin, steps_);
}

void Simulation::engine_loaded() {
    int oldest = kNoVersion;
    for (const Engine& engine : engines_) oldest = std::min(oldest, engine.version);
    if (oldest > serving_) {
        serving_ = oldest;
        admit();
        take_batch();
    }
    for (int id : std::exchange(stuck_, {}))
        if (trajectories_[id].state == Trajectory::kStuck) generate(id);
}

void Simulation::sample() {
    ++samples_;
    double generating = in_use_ - resetting_ - stepping_, all = in_use_ + scoring_;
    if (training_ && !running_) {
        parts_[kTrain] += 1;
    } else if (one_batch() && resetting_) {
        parts_[kReset] += 1;
    } else if (!all) {
        parts_[training_ ? kTrain : kWeights] += 1;
    } else {
        parts_[kGenerate] += generating / all;
        parts_[kReset] += resetting_ / all;
        parts_[kStep] += stepping_ / all;
        parts_[kReward] += scoring_ / all;
    }
}

}  // namespace surrogate

extern "C" void run_surrogate(const double* in, double* out) {
    surrogate::Simulation(in).run(out);
}
