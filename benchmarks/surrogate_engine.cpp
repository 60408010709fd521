// The engine of the surrogate, from event to event as in rollart/simulator/engine.py.

#include "surrogate.h"

namespace surrogate {

void Engine::add(int trajectory, double length, double whole, double prompt, double target, int group) {
    Sequence* sequence;
    if (unused_.empty()) {
        sequence = &all_.emplace_back();
    } else {
        sequence = unused_.back();
        unused_.pop_back();
        *sequence = Sequence();
    }
    double cached = 0;
    if (length < whole) {  // a part of the conversation is left out: only the prompt can be cached
        cached = has_prompt(group) ? std::min(prompt, length - 1) : 0;
    } else {
        cached = take_cached(trajectory);
        if (!cached && whole <= prompt && has_prompt(group)) cached = whole - 1;
        cached = std::min(cached, whole - 1);
    }
    sequence->trajectory = trajectory;
    sequence->length = length;
    sequence->fresh = length - cached;
    sequence->target = target;
    sequence->whole = length >= whole;
    of_[trajectory] = sequence;
    ++open;
    waiting_.push_back(sequence);
    if (phase_ == kDecode) {
        advance();
        schedule();
    }
}

void Engine::cancel(int trajectory) {
    auto found = of_.find(trajectory);
    if (found == of_.end()) return;
    Sequence* sequence = found->second;
    of_.erase(found);
    --open;
    sequence->cancelled = true;
    if (!sequence->decoding) return;
    advance();
    leave(sequence);
    if (phase_ == kDecode) schedule();
}

void Engine::swap(double seconds, int version) {
    standstill_ = seconds;
    next_version_ = version;
    if (phase_ == kDecode) {
        advance();
        schedule();
    }
}

void Engine::advance() {
    double seconds = simulation_.now - at_;
    if (seconds <= 0) return;
    at_ = simulation_.now;
    double steps;
    if (phase_ != kDecode) {
        steps = rate_ * seconds;
        if (phase_ == kPrefill) busy += seconds;
    } else if (count_) {
        auto [fixed, slope] = cost_.decode(count_, context_);
        double a = slope * count_ / 2, b = fixed + slope * (context_ - count_ / 2.0);
        steps = 2 * seconds / (b + std::sqrt(b * b + 4 * a * seconds));
        busy += seconds;
    } else {
        return;
    }
    steps_ += steps;
    context_ += count_ * steps;
}

void Engine::schedule() {
    if (phase_ == kDecode) begin();
    double due = phase_ == kDecode ? kNever : phase_end_;
    while (!ends_.empty() && !ends_.top().active()) ends_.pop();
    if (!ends_.empty()) {
        double left = ends_.top().step - steps_;
        if (phase_ != kDecode) {
            if (rate_ > 0) due = std::min(due, at_ + std::max(0.0, left) / rate_);
        } else {
            if (count_ > 1) left = std::min(left, (cost_.kv_tokens - context_) / count_);
            left = std::max(left, kClose);
            auto [fixed, slope] = cost_.decode(count_, context_);
            due = at_ + left * (fixed + slope * (context_ + count_ * (left - 1) / 2));
        }
    }
    ++timer;
    if (due < kNever) simulation_.wake_engine(due, *this);
}

void Engine::wake() {
    advance();
    std::vector<Sequence*> ended;
    while (!ends_.empty() && (!ends_.top().active() || ends_.top().step <= steps_ + kClose)) {
        End end = ends_.top();
        ends_.pop();
        if (!end.active()) continue;
        leave(end.sequence);
        ended.push_back(end.sequence);
    }
    for (Sequence* sequence : ended) finish(sequence);
    if (phase_ != kDecode && at_ >= phase_end_ - 1e-12) end_phase();
    if (count_ > 1 && context_ >= cost_.kv_tokens - kClose) preempt();
    schedule();
}

void Engine::begin() {
    if (standstill_ >= 0) {
        phase_ = kSwap;
        phase_end_ = at_ + standstill_;
        rate_ = 0;
    } else if (recompute_) {
        double attended = context_ * context_ / std::max(1, count_) / 2, passes = std::max(1.0, context_ / cost_.chunk);
        phase_ = kRecompute;
        phase_end_ = at_ + cost_.pass(context_, attended, 0, passes, 0, 0, 1);
        rate_ = 0;
    } else if (!waiting_.empty()) {
        begin_prefill();
    }
}

void Engine::begin_prefill() {
    double tokens = 0, attended = 0, kv = 0;
    while (!waiting_.empty() && count_ + group_.size() < cost_.max_batch) {
        Sequence* sequence = waiting_.front();
        if (!sequence->cancelled) {
            double length = sequence->length + sequence->made;
            bool full = context_ + kv + length > cost_.kv_tokens * 0.99;
            bool fits = group_.empty() || tokens + sequence->fresh <= cost_.chunk;
            if (!fits || (full && (count_ || !group_.empty()))) break;
            group_.push_back(sequence);
            tokens += sequence->fresh;
            attended += sequence->fresh * (length - sequence->fresh / 2);
            kv += length;
        }
        waiting_.pop_front();
    }
    if (group_.empty()) return;
    evict(cost_.kv_tokens - context_ - kv);
    double passes = std::max(1.0, tokens / cost_.chunk);
    double seconds = cost_.pass(tokens, attended, kv, passes, count_, context_, static_cast<int>(group_.size()));
    phase_ = kPrefill;
    phase_end_ = at_ + seconds;
    rate_ = count_ ? passes / seconds : 0;
}

void Engine::end_phase() {
    Phase ended = std::exchange(phase_, kDecode);
    if (ended == kSwap) {
        version = next_version_;
        standstill_ = -1;
        conversations_.clear();
        where_.clear();
        prompts_.clear();
        cached_ = 0;
        recompute_ = count_ > 0;
        simulation_.engine_loaded();
    } else if (ended == kRecompute) {
        recompute_ = false;
    } else {
        for (Sequence* sequence : std::exchange(group_, {}))
            if (!sequence->cancelled) join(sequence);
    }
}

void Engine::join(Sequence* sequence) {
    sequence->made += 1;
    simulation_.first_token(sequence->trajectory, version);
    if (sequence->cancelled) return;
    sequence->base = sequence->length + sequence->made;
    double left = sequence->target - sequence->made;
    if (left < 1 - kClose) {
        finish(sequence);
        return;
    }
    sequence->joined = steps_;
    sequence->decoding = true;
    sequence->order = ++order_;
    ++count_;
    context_ += sequence->base;
    ends_.push({steps_ + left, order_, sequence});
    joined_.push_back({0, order_, sequence});
    if (joined_.size() > 4 * static_cast<size_t>(count_) + 64) {
        auto gone = [](const End& each) { return !each.active(); };
        joined_.erase(std::remove_if(joined_.begin(), joined_.end(), gone), joined_.end());
    }
}

void Engine::leave(Sequence* sequence) {
    context_ -= sequence->base + steps_ - sequence->joined;
    if (!--count_) context_ = 0;
    sequence->decoding = false;
}

void Engine::finish(Sequence* sequence) {
    if (sequence->cancelled) return;
    int trajectory = sequence->trajectory;
    if (sequence->whole) {
        take_cached(trajectory);
        conversations_.emplace_back(trajectory, sequence->length + sequence->target - 1);
        where_[trajectory] = std::prev(conversations_.end());
        cached_ += conversations_.back().second;
    }
    evict(cost_.kv_tokens - context_);
    of_.erase(trajectory);
    --open;
    double tokens = sequence->target;
    unused_.push_back(sequence);
    simulation_.generated(trajectory, tokens);
}

void Engine::preempt() {
    while (!joined_.empty() && !joined_.back().active()) joined_.pop_back();
    if (joined_.empty()) return;
    Sequence* sequence = joined_.back().sequence;
    sequence->made += steps_ - sequence->joined;
    leave(sequence);
    sequence->fresh = std::ceil(sequence->length + sequence->made);
    waiting_.push_front(sequence);
}

void Engine::evict(double limit) {
    while (!conversations_.empty() && cached_ > limit) {
        auto& [conversation, tokens] = conversations_.front();
        double left = std::min(tokens, std::max(0.0, std::floor(limit) - cached_ + tokens));
        cached_ -= tokens - left;
        tokens = left;
        if (left > 0) break;
        where_.erase(conversation);
        conversations_.pop_front();
    }
}

double Engine::take_cached(int conversation) {
    auto found = where_.find(conversation);
    if (found == where_.end()) return 0;
    double tokens = found->second->second;
    cached_ -= tokens;
    conversations_.erase(found->second);
    where_.erase(found);
    return tokens;
}

}  // namespace surrogate
