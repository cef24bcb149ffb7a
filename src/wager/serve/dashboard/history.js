// Readings of /live over the last minutes: what happened between two of them, and over all of them.

export const SPAN = 180; // seconds that are kept

const total = (drafts, name) => Object.values(drafts).reduce((sum, each) => sum + each[name], 0);
const difference = (now, before) => now.map((count, at) => count - (before?.[at] ?? 0));
const sum = (counts) => counts.reduce((all, each) => all + each, 0);

const NO_DRAFTS = { drafts: 0, verified: 0, accepted: 0, verified_by_depth: [], accepted_by_length: [] };

export class History {
  readings = [];
  samples = [];

  add(now) {
    const before = this.readings.at(-1);
    if (before?.uptime_s === now.uptime_s) return; // the same answer again
    if (before && now.uptime_s < before.uptime_s) {
      // the server was started anew
      this.readings = [];
      this.samples = [];
    } else if (before) {
      this.samples.push(sample(now, before));
    }
    this.readings.push(now);
    const old = (at) => at < now.uptime_s - SPAN;
    while (old(this.readings[0].uptime_s)) this.readings.shift();
    while (this.samples.length && old(this.samples[0].at)) this.samples.shift();
  }

  // The oldest reading if anything was decoded since, else null: then counts are those since the start.
  get base() {
    const [first, last] = [this.readings[0], this.readings.at(-1)];
    return first && last.tokens > first.tokens ? first : null;
  }

  // Tokens that a sequence got from a pass, and the share of verified guesses that were accepted.
  get means() {
    const now = this.readings.at(-1),
      base = this.base;
    const over = (name) => total(now.drafts, name) - (base ? total(base.drafts, name) : 0);
    const tokens = now.tokens - (base?.tokens ?? 0);
    return { tau: tokens / (tokens - over("accepted")), accepted: over("accepted") / over("verified") };
  }

  // Of all draft decisions the percentage of each depth, and their mean.
  get depths() {
    const counts = difference(this.readings.at(-1).planned_depths, this.base?.planned_depths),
      all = sum(counts);
    return {
      shares: counts.map((count) => (100 * count) / Math.max(1, all)),
      mean: sum(counts.map((count, depth) => count * depth)) / all,
    };
  }

  // Of all choices that ended the percentage by tokens a pass, rounded down.
  get taus() {
    const counts = difference(this.readings.at(-1).requests_by_tau, this.base?.requests_by_tau),
      all = sum(counts);
    return counts.map((count) => (100 * count) / Math.max(1, all));
  }

  // By drafter and depth, of the drafts that were verified so deep, the share whose guess there was accepted.
  get acceptance() {
    const now = this.readings.at(-1).drafts,
      before = this.base?.drafts ?? {};
    return Object.entries(now)
      .map(([name, counts]) => {
        const old = before[name] ?? NO_DRAFTS;
        const verified = difference(counts.verified_by_depth, old.verified_by_depth);
        const accepted = difference(counts.accepted_by_length, old.accepted_by_length);
        const shares = verified.map((_, depth) => sum(accepted.slice(depth)) / sum(verified.slice(depth))).slice(1);
        return { name, shares: shares.map((share) => (Number.isFinite(share) ? share : null)) };
      })
      .filter(({ shares }) => shares.some((share) => share !== null));
  }
}

// What happened between two readings; null where nothing did.
function sample(now, before) {
  const seconds = now.uptime_s - before.uptime_s,
    steps = now.steps - before.steps;
  const figures = steps ? now.figures : null;
  return {
    at: now.uptime_s,
    speed: seconds > 0 ? (now.tokens - before.tokens) / seconds : 0,
    running: now.running,
    waiting: now.waiting,
    cache: 100 * now.cache_usage,
    stages: steps
      ? Object.fromEntries(
          Object.entries(now.stage_seconds).map(([name, spent]) => [
            name,
            (1000 * (spent - (before.stage_seconds[name] ?? 0))) / steps,
          ]),
        )
      : null,
    predicted: figures?.predicted_speedup ?? null,
    observed: figures?.observed_speedup ?? null,
    cost: figures?.row_cost ?? null,
  };
}
