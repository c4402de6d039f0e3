/** A job as it continues: its record, its metrics and its newest events, over one stream. */

import { useEffect, useState } from "./lib.js";
import { get, Problem, stream } from "./api.js";
import { withRow } from "./series.js";

/** @typedef {import("./series.js").Series} Series */

/** Metrics that the charts of a job begin with; `*` stands for any ending. */
export const SHOWN = [
  "reward", "group_reward_std", "frac_reward_zero_std", "eval/*", "loss", "kl", "kl/old_k3", "entropy", "clip_ratio/*",
  "cispo_clip_ratio", "completions/mean_length", "completions/max_length", "completions/clipped_ratio", "grad_norm",
  "learning_rate", "mismatch/logprob_diff_mean", "mismatch/k3_kl", "staleness", "staleness/mean", "staleness/max", "num_tokens",
  "time/*", "total/*",
];

/** The service says something every two seconds; a stream that is silent for so long is dead. */
const SILENT_MS = 15_000;

const MAX_POINTS = 2000;
const MAX_EVENTS = 500;
const ENDED = ["succeeded", "failed", "cancelled"];

/** @param {any} record */
export function hasEnded(record) {
  return ENDED.includes(record?.status);
}

/**
 * Waits until the tab is shown, or the signal aborts.
 * @param {AbortSignal} signal
 */
function shownAgain(signal) {
  return /** @type {Promise<void>} */ (new Promise((resolve) => {
    const look = () => {
      if (document.hidden && !signal.aborted) return;
      document.removeEventListener("visibilitychange", look);
      resolve();
    };
    document.addEventListener("visibilitychange", look);
    signal.addEventListener("abort", look);
    look();
  }));
}

export class Run {
  /** @param {string} id */
  constructor(id) {
    this.id = id;
    /** @type {any} */
    this.record = null;
    /** @type {Series} */
    this.series = { steps: [], columns: {} };
    /** @type {string[]} names of all metrics, loaded or not */
    this.names = [];
    this.numSteps = 0;
    /** @type {any[]} oldest first */
    this.events = [];
    this.doing = "";
    /** Whether a connection broke and none has taken its place yet. */
    this.isLost = false;
    /** @type {unknown} */
    this.error = null;
    /** @type {Set<() => void>} */
    this.followers = new Set();
    this.wanted = new Set(SHOWN);
    this.lastId = "";
    this.abort = new AbortController();
  }

  tell() {
    for (const follower of this.followers) follower();
  }

  async load() {
    const path = `v1/jobs/${this.id}`;
    try {
      const columns = { names: [...this.wanted].join(","), points: MAX_POINTS };
      const [record, found, events] = await Promise.all([
        get(path), get(`${path}/metrics/columns`, columns), get(`${path}/events`, { last: MAX_EVENTS }),
      ]);
      this.record = record;
      this.take(found);
      this.events = events.events;
      this.lastId = this.events[this.events.length - 1]?.id ?? "0";
      this.error = null;
    } catch (error) {
      this.error = error;
    }
    this.tell();
  }

  /** @param {any} found MetricsColumns */
  take(found) {
    this.series = { steps: found.steps, columns: found.columns };
    this.names = found.names;
    this.numSteps = found.num_steps;
  }

  /**
   * Loads more metrics.
   * @param {string[]} names
   */
  async want(names) {
    const missing = names.filter((name) => !this.has(name));
    if (!missing.length) return;
    for (const name of missing) this.wanted.add(name);
    try {
      this.take(await get(`v1/jobs/${this.id}/metrics/columns`, { names: [...this.wanted].join(","), points: MAX_POINTS }));
    } catch (error) {
      this.error = error;
    }
    this.tell();
  }

  /** @param {string} name */
  has(name) {
    return [...this.wanted].some((one) => (one.endsWith("*") ? name.startsWith(one.slice(0, -1)) : one === name));
  }

  /**
   * Follows the job to its end; after a lost connection it continues after the last event it saw. A
   * hidden tab follows nothing, for a browser has six connections to a server; shown again, it loads
   * the job anew.
   */
  async follow() {
    const { signal } = this.abort;
    let pause_ms = 500;
    while (!signal.aborted && !hasEnded(this.record)) {
      if (document.hidden) {
        await shownAgain(signal);
        if (!signal.aborted) await this.load();
        continue;
      }
      try {
        await this.listen(() => (pause_ms = 500));
        await this.refresh();
      } catch (error) {
        if (signal.aborted) return;
        this.isLost = true;
        this.tell();
        if (error instanceof Problem && [401, 403, 404].includes(error.status)) {
          this.error = error;
          this.tell();
          return;
        }
        if (!document.hidden) await this.refresh();
      }
      await new Promise((resolve) => setTimeout(resolve, pause_ms));
      pause_ms = Math.min(pause_ms * 2, 10_000);
    }
    this.isLost = false;
    this.tell();
  }

  /**
   * Takes events until the stream ends, or the tab is hidden.
   * @param {() => void} heard is called at each event
   */
  async listen(heard) {
    const cut = new AbortController();
    const end = () => cut.abort();
    const hide = () => document.hidden && end();
    let silence = setTimeout(end, SILENT_MS);
    const arrived = () => {
      clearTimeout(silence);
      silence = setTimeout(end, SILENT_MS);
      if (this.isLost) {
        this.isLost = false;
        this.tell();
      }
    };
    this.abort.signal.addEventListener("abort", end);
    document.addEventListener("visibilitychange", hide);
    try {
      for await (const event of stream(`v1/jobs/${this.id}/events?progress=true`, this.lastId, cut.signal, arrived)) {
        heard();
        if (event.type === "end") return;
        this.happened(event);
      }
    } finally {
      clearTimeout(silence);
      this.abort.signal.removeEventListener("abort", end);
      document.removeEventListener("visibilitychange", hide);
    }
  }

  /** @param {{id: string, type: string, data: any}} event */
  happened({ id, type, data }) {
    if (type === "progress") {
      this.doing = data.message;
      return this.tell();
    }
    if (id) this.lastId = id;
    this.events = [...this.events.slice(1 - MAX_EVENTS), data];
    this.doing = "";
    if (type === "step" || type === "eval") this.stepped(data.data);
    if (type === "status" || type === "checkpoint") void this.refresh();
    return this.tell();
  }

  /** @param {any} data of a step's event */
  stepped(data) {
    if (typeof data?.step !== "number") return;
    const loaded = new Set(Object.keys(this.series.columns));
    for (const name of Object.keys(data.metrics ?? {})) {
      if (!loaded.has(name) && this.has(name)) this.series.columns[name] = this.series.steps.map(() => null);
    }
    this.series = withRow(this.series, data.step, data.metrics ?? {});
    this.names = [...new Set([...this.names, ...Object.keys(data.metrics ?? {})])].sort();
    this.numSteps = Math.max(this.numSteps, this.series.steps.length);
    if (this.record && data.steps) {
      this.record = { ...this.record, step: data.step, eta_s: data.eta_s, reward: data.metrics?.reward ?? null, cost: data.metrics?.["total/cost"] ?? this.record.cost };
    }
    if (this.series.steps.length > 2 * MAX_POINTS) void this.load();
  }

  async refresh() {
    try {
      this.record = await get(`v1/jobs/${this.id}`);
      this.error = null;
    } catch (error) {
      if (error instanceof Problem && error.status) this.error = error;
    }
    this.tell();
  }
}

/**
 * Returns the job, followed for as long as the page shows it.
 * @param {string} id
 * @param {number} [turn] another number loads the job anew
 */
export function useRun(id, turn = 0) {
  const [, setCount] = useState(0);
  const [run, setRun] = useState(() => new Run(id));
  useEffect(() => {
    const next = run.id === id && !run.record ? run : new Run(id);
    setRun(next);
    let isWaiting = false;
    const follower = () => {
      if (isWaiting) return;
      isWaiting = true;
      requestAnimationFrame(() => {
        isWaiting = false;
        setCount((count) => count + 1);
      });
    };
    next.followers.add(follower);
    void next.load().then(() => (next.record ? next.follow() : undefined));
    return () => {
      next.followers.delete(follower);
      next.abort.abort();
    };
  }, [id, turn]);
  return run;
}
