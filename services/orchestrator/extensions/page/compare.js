/** Several jobs in one chart for each metric. */

import { html, useMemo, useState } from "./lib.js";
import { get } from "./api.js";
import { Chart } from "./chart.js";
import { AddMetric, AxisChoice } from "./charts.js";
import { hasEnded } from "./live.js";
import { ENDLESS, Fault, Status } from "./parts.js";
import { differences, lineOf, withRates } from "./series.js";
import { link, useChoice, useRepeated } from "./state.js";
import { number, visible } from "./text.js";

const LOOK_MS = 5000;
const ALWAYS = ["total/hours", "total/tokens", "eval/reward_low", "eval/reward_high", "num_tokens", "time/step"];

/** @typedef {import("./series.js").Axis} Axis */

/** @param {{ids: string[]}} props */
export function Compare({ ids }) {
  const [axis, setAxis] = useChoice("axis", /** @type {Axis} */ ("step"));
  const [smoothing, setSmoothing] = useChoice("smoothing", 0);
  const [metrics, setMetrics] = useChoice("compared", ["reward", "eval/reward", "entropy", "completions/mean_length", "grad_norm"]);
  const [jobs, setJobs] = useState(/** @type {{record: any, series: any, names: string[]}[]} */ ([]));
  const [error, setError] = useState(/** @type {unknown} */ (null));
  useRepeated(() => {
    if (jobs.length === ids.length && jobs.every((job) => hasEnded(job.record) && metrics.every((name) => name in job.series.columns || !job.names.includes(name)))) return;
    Promise.all(ids.map(async (id) => {
      const names = [...new Set([...metrics, ...ALWAYS])].join(",");
      const [record, found] = await Promise.all([get(`v1/jobs/${id}`), get(`v1/jobs/${id}/metrics/columns`, { names, points: 1000 })]);
      return { record, names: found.names, series: withRates({ steps: found.steps, columns: found.columns }) };
    })).then((all) => {
      setJobs(all);
      setError(null);
    }).catch(setError);
  }, LOOK_MS, [ids.join(), metrics.join(), jobs.length]);
  const names = useMemo(() => [...new Set(jobs.flatMap((job) => job.names))].sort(), [jobs]);
  const labels = labelsOf(jobs.map((job) => job.record));
  const charts = useMemo(() => metrics.map((metric) => ({
    metric,
    lines: /** @type {import("./series.js").Line[]} */ (jobs.map((job, index) => lineOf(job.series, axis, metric, {
      label: labels[index], metric, colour: index, points: metric.startsWith("eval/"), dash: index >= 8,
      band: metric === "eval/reward" ? ["eval/reward_low", "eval/reward_high"] : undefined,
    })).filter(Boolean)),
  })), [jobs, metrics, axis]);
  return html`<main id="main">
    <div class="bar-of-tools"><h1>${ids.length} jobs side by side</h1>
      <${AxisChoice} axis=${axis} choose=${setAxis} />
      <label>smoothing <input type="range" min="0" max="0.98" step="0.02" value=${smoothing} onInput=${(/** @type {any} */ event) => setSmoothing(Number(event.target.value))} /></label>
      <${AddMetric} names=${names} add=${(/** @type {string} */ name) => metrics.includes(name) || setMetrics([...metrics, name])} /></div>
    <${Fault} error=${error} />
    <div class="charts even">${charts.map(({ metric, lines }) => html`<${Chart} key=${metric} title=${metric} lines=${lines} axis=${axis} smoothing=${smoothing} sync="compared" height=${230}
      note="none of these jobs has it" onRemove=${() => setMetrics(metrics.filter((one) => one !== metric))} />`)}</div>
    <${Last} jobs=${jobs} labels=${labels} metrics=${metrics} />
    <${Configuration} jobs=${jobs} labels=${labels} />
  </main>`;
}

/**
 * Returns a name for each job: its own, with its id where two have the same.
 * @param {any[]} records
 */
function labelsOf(records) {
  return records.map((record) => (records.filter((one) => one.name === record.name).length > 1 ? `${record.name} ${record.id.slice(-6)}` : record.name));
}

/** @param {{jobs: any[], labels: string[], metrics: string[]}} props */
function Last({ jobs, labels, metrics }) {
  const last = (/** @type {any} */ job, /** @type {string} */ metric) => (job.series.columns[metric] ?? []).findLast((/** @type {number | null} */ value) => value !== null);
  return html`<div class="scrolls"><table><thead><tr><th>job</th><th>status</th><th>steps</th>${metrics.map((name) => html`<th>${name}</th>`)}</tr></thead>
    <tbody>${jobs.map((job, index) => html`<tr><td><a href=${link(["jobs", job.record.id])}>${visible(labels[index])}</a></td><td><${Status} status=${job.record.status} /></td>
      <td>${job.record.step}${job.record.steps === ENDLESS ? "" : `/${job.record.steps}`}</td>${metrics.map((name) => html`<td>${number(last(job, name), 4)}</td>`)}</tr>`)}</tbody></table></div>`;
}

/** Keys that two jobs rarely share, and that say nothing of what was learned. */
const OF_ITS_OWN = /^(?:name|metadata|request)(?:\.|$)/;

/**
 * What the jobs were asked for where they differ: a row for each key.
 * @param {{jobs: any[], labels: string[]}} props
 */
function Configuration({ jobs, labels }) {
  const rows = differences(jobs.map((job) => job.record.job)).filter(([key]) => !OF_ITS_OWN.test(key));
  const shown = (/** @type {unknown} */ value) => (value === undefined || value === null ? "–" : visible(typeof value === "string" ? value : JSON.stringify(value)).slice(0, 120));
  return html`<h2>How they differ</h2>${rows.length ? html`<div class="scrolls"><table><thead><tr><th>key</th>${labels.map((label) => html`<th>${visible(label)}</th>`)}</tr></thead>
    <tbody>${rows.map(([key, values]) => html`<tr><td><code>${key}</code></td>${values.map((value) => html`<td>${shown(value)}</td>`)}</tr>`)}</tbody></table></div>`
    : html`<p class="none">these jobs have the same configuration</p>`}`;
}
