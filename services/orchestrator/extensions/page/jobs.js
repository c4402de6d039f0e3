/** The list of jobs. */

import { html, useEffect, useMemo, useRef, useState } from "./lib.js";
import { get } from "./api.js";
import { Sparkline } from "./chart.js";
import { Fault, Progress, Rows, Status } from "./parts.js";
import { link, useChoice, useRepeated } from "./state.js";
import { ago, duration, number, visible } from "./text.js";

const PAGE = 1000;
const LOOK_MS = 3000;
const SPARK_POINTS = 60;
const STATUSES = ["queued", "running", "paused", "succeeded", "failed", "cancelled"];

/** @typedef {any} Summary a JobSummary of the API */

/** Orders of the list: the text or number of a job, by which it is sorted. */
const ORDERS = /** @type {Record<string, (job: Summary) => any>} */ ({
  newest: (job) => -job.created_at,
  name: (job) => job.name,
  status: (job) => STATUSES.indexOf(job.status),
  reward: (job) => -(job.reward ?? -Infinity),
  progress: (job) => -(job.step / (job.steps || 1)),
  cost: (job) => -(job.cost ?? -Infinity),
});

/** @param {{chosen: string[], choose: (ids: string[]) => void}} props */
export function Jobs({ chosen, choose }) {
  const [jobs, setJobs] = useState(/** @type {Summary[] | null} */ (null));
  const [isMore, setMore] = useState(false);
  const [unreadable, setUnreadable] = useState(/** @type {string[]} */ ([]));
  const [error, setError] = useState(/** @type {unknown} */ (null));
  const [query, setQuery] = useState("");
  const [status, setStatus] = useChoice("jobs-status", "");
  const [order, setOrder] = useChoice("jobs-order", "newest");
  useRepeated(() => {
    get("v1/jobs", { limit: PAGE })
      .then((page) => {
        setJobs(page.jobs);
        setMore(page.next_after !== null);
        setUnreadable(page.unreadable);
        setError(null);
      })
      .catch(setError);
  }, LOOK_MS, []);
  const shown = useMemo(() => chosenOf(jobs ?? [], query, status, order), [jobs, query, status, order]);
  const counts = STATUSES.map((name) => [name, (jobs ?? []).filter((job) => job.status === name).length]);

  return html`<main id="main">
    <div class="bar-of-tools">
      <h1>Jobs</h1>
      <input type="search" placeholder="name, model or metadata" aria-label="filter the jobs" value=${query}
        onInput=${(/** @type {any} */ event) => setQuery(event.target.value)} />
      <select aria-label="status" value=${status} onChange=${(/** @type {any} */ event) => setStatus(event.target.value)}>
        <option value="">all (${jobs?.length ?? 0})</option>
        ${counts.map(([name, count]) => html`<option value=${name}>${name} (${count})</option>`)}
      </select>
      <select aria-label="order" value=${order} onChange=${(/** @type {any} */ event) => setOrder(event.target.value)}>
        ${Object.keys(ORDERS).map((name) => html`<option value=${name}>${name === "newest" ? "newest first" : `by ${name}`}</option>`)}
      </select>
      ${chosen.length > 1 && html`<a class="button" href=${link(["compare"], { jobs: chosen.join(",") })}>Compare ${chosen.length}</a>`}
    </div>
    <${Fault} error=${error} />
    ${isMore && html`<p class="hint">the newest ${PAGE} jobs are shown</p>`}
    ${unreadable.length > 0 && html`<p class="hint">not shown, for this version of Hone cannot read them: ${visible(unreadable.join(", "))}</p>`}
    ${jobs && !jobs.length && !unreadable.length && html`<p class="none">No jobs yet. <code>hone run job.toml</code> submits one, or <a href="#/new">start one here</a>.</p>`}
    ${shown.length > 0 && html`<div class="jobs">
      <div class="job head" aria-hidden="true">
        <span></span><span>job</span><span>status</span><span>step</span><span>reward</span><span></span><span>time left</span><span>started</span>
      </div>
      <${Rows} rows=${shown} height=${44} label="jobs"
        row=${(/** @type {Summary} */ job) => html`<${JobRow} key=${job.id} job=${job} isChosen=${chosen.includes(job.id)}
          onChoose=${() => choose(chosen.includes(job.id) ? chosen.filter((id) => id !== job.id) : [...chosen, job.id])} />`} />
    </div>`}
  </main>`;
}

/**
 * @param {Summary[]} jobs
 * @param {string} query
 * @param {string} status
 * @param {string} order
 */
function chosenOf(jobs, query, status, order) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const found = jobs.filter((job) => {
    if (status && job.status !== status) return false;
    const text = `${job.name} ${job.id} ${job.model} ${Object.entries(job.metadata).flat().join(" ")}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
  const by = ORDERS[order] ?? ORDERS.newest;
  return found.sort((a, b) => (by(a) < by(b) ? -1 : by(a) > by(b) ? 1 : b.created_at - a.created_at));
}

/** @param {{job: Summary, isChosen: boolean, onChoose: () => void}} props */
function JobRow({ job, isChosen, onChoose }) {
  const rewards = useRewards(job);
  const where = job.place ? `place ${job.place} in the queue` : job.waits ?? job.doing ?? job.stopped ?? job.error ?? "";
  return html`<div class="job">
    <label class="choose"><input type="checkbox" checked=${isChosen} onChange=${onChoose} aria-label=${`compare ${job.name}`} /></label>
    <a class="name" href=${link(["jobs", job.id])}><strong><bdi>${visible(job.name)}</bdi></strong><small><bdi>${visible(job.model)}</bdi>${job.learning_rate === null || job.learning_rate === undefined ? "" : `, learning rate ${number(job.learning_rate)}`}</small></a>
    <span><${Status} status=${job.status} /><small title=${where}>${visible(where)}</small></span>
    <${Progress} value=${job.step} of=${job.steps} />
    <span class="number">${number(job.reward)}</span>
    <${Sparkline} values=${rewards} label=${`reward of ${job.name}`} />
    <span>${job.status === "running" && job.eta_s !== null ? duration(job.eta_s) : ""}${job.cost === null ? "" : html`<small>${number(job.cost)} ${job.currency}</small>`}</span>
    <time dateTime=${new Date(job.created_at * 1000).toISOString()} title=${new Date(job.created_at * 1000).toLocaleString()}>${ago(job.created_at)}</time>
  </div>`;
}

/** Rewards by job, kept while the tab is open: a list that is scrolled asks for each job once. */
const known = /** @type {Map<string, {step: number, values: (number | null)[]}>} */ (new Map());

/** @type {Promise<unknown>} */
let queue = Promise.resolve();

/**
 * Returns the rewards of a job so far. They are asked for once, one job after another; then each
 * look at the list adds the newest.
 * @param {Summary} job
 */
function useRewards(job) {
  const [, setCount] = useState(0);
  const alive = useRef(true);
  useEffect(() => () => void (alive.current = false), []);
  useEffect(() => {
    if (!job.step || known.has(job.id)) return;
    queue = queue.then(async () => {
      if (!alive.current || known.has(job.id)) return;
      try {
        const found = await get(`v1/jobs/${job.id}/metrics/columns`, { names: "reward", points: SPARK_POINTS });
        known.set(job.id, { step: found.steps.at(-1) ?? 0, values: found.columns.reward ?? [] });
        if (alive.current) setCount((count) => count + 1);
      } catch {
        known.set(job.id, { step: job.step, values: [] });
      }
    });
  }, [job.id, job.step > 0]);
  const found = known.get(job.id);
  if (found && job.step > found.step) {
    found.step = job.step;
    found.values = [...found.values.slice(-2 * SPARK_POINTS), job.reward];
  }
  return found?.values ?? [];
}
