/** The charts of one job. */

import { html, useEffect, useMemo, useState } from "./lib.js";
import { Chart } from "./chart.js";
import { AXES, RATES, lineOf, stacked, withRates } from "./series.js";
import { entryOf, meaningOf } from "./meanings.js";
import { link, useChoice } from "./state.js";

/** @typedef {import("./series.js").Axis} Axis */
/** @typedef {import("./series.js").Line} Line */
/** @typedef {import("./series.js").Series} Series */

/** Stages of a step, from the first to the last. Together they are about time/step. */
const STAGES = ["wait_for_batch", "store", "train", "sync", "checkpoint", "eval", "record"];

/**
 * The charts that every job has: the title, and the lines by metric. A `*` stands for any ending.
 * @type {[string, string[]][]}
 */
const STANDARD = [
  ["loss", ["loss", "eval/loss"]],
  ["KL divergence", ["kl", "kl/old_k3"]],
  ["entropy", ["entropy"]],
  ["clipped tokens", ["clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/dual_mean", "cispo_clip_ratio"]],
  ["completion length", ["completions/mean_length", "completions/max_length"]],
  ["cut off by max_tokens", ["completions/clipped_ratio"]],
  ["groups without signal", ["frac_reward_zero_std"]],
  ["gradient norm", ["grad_norm"]],
  ["sampler against trainer", ["mismatch/logprob_diff_mean", "mismatch/k3_kl"]],
  ["staleness", ["staleness/mean", "staleness/max"]],
];

/**
 * Returns the held-out rewards, each with its confidence interval, and the training reward.
 * @param {Series} series
 * @param {Axis} axis
 */
function rewardLines(series, axis) {
  const sets = Object.keys(series.columns).filter((name) => /^eval\/(?:[\w-]+\/)?reward$/.test(name));
  const heldOut = sets.map((name, index) =>
    lineOf(series, axis, name, { label: `held-out ${name.slice(5, -7) || "reward"}`.trim(), colour: index + 1, points: true, band: [`${name}_low`, `${name}_high`] }));
  return present([lineOf(series, axis, "reward", { label: "training reward", colour: 0 }), ...heldOut]);
}

/**
 * @param {(Line | null)[]} lines
 * @returns {Line[]}
 */
function present(lines) {
  return /** @type {Line[]} */ (lines.filter(Boolean));
}

/**
 * @param {Series} series
 * @param {Axis} axis
 * @param {string[]} metrics
 */
function linesOf(series, axis, metrics) {
  return present(metrics.map((name, index) => lineOf(series, axis, name, { colour: index })));
}

/**
 * Returns the stages of each step, stacked. A stage that a step does not have took no time.
 * @param {Series} series
 * @param {Axis} axis
 */
function stageLines(series, axis) {
  const filled = {
    steps: series.steps,
    columns: Object.fromEntries(Object.entries(series.columns).map(([name, values]) =>
      [name, name.startsWith("time/") ? values.map((value, index) => (series.columns["time/step"]?.[index] === null ? null : (value ?? 0))) : values])),
  };
  return stacked(present(STAGES.map((stage, index) => lineOf(filled, axis, `time/${stage}`, { label: stage, colour: index }))));
}

/** @param {{run: import("./live.js").Run}} props */
export function Charts({ run }) {
  const [axis, setAxis] = useChoice("axis", /** @type {Axis} */ ("step"));
  const [smoothing, setSmoothing] = useChoice("smoothing", 0);
  const [added, setAdded] = useChoice("added-charts", /** @type {string[]} */ ([]));
  useEffect(() => void run.want(added.flatMap((one) => one.split(" + "))), [run, added.join()]);
  const series = useMemo(() => withRates(run.series), [run.series]);
  const charts = useMemo(() => [
    { title: "reward", lines: rewardLines(series, axis) },
    ...STANDARD.map(([title, metrics]) => ({ title, lines: linesOf(series, axis, metrics) })),
    { title: "seconds of a step", lines: stageLines(series, axis) },
    { title: "tokens per second", lines: linesOf(series, axis, RATES) },
    { title: "cost", lines: linesOf(series, axis, ["total/cost"]) },
  ].filter(({ lines, title }) => lines.length || title === "reward"), [series, axis]);
  const own = added.map((title) => ({ title, lines: linesOf(series, axis, title.split(" + ")) }));
  /** @param {number} step */
  const pick = (step) => (location.hash = link(["jobs", run.id, "rollouts"], { step }));

  return html`<div>
    <div class="bar-of-tools small">
      <${AxisChoice} axis=${axis} choose=${setAxis} />
      <label>smoothing <input type="range" min="0" max="0.98" step="0.02" value=${smoothing} aria-valuetext=${String(smoothing)}
        onInput=${(/** @type {any} */ event) => setSmoothing(Number(event.target.value))} /></label>
      <${AddMetric} names=${run.names} add=${(/** @type {string} */ title) => added.includes(title) || setAdded([...added, title])} />
      <span class="hint">drag to zoom, double click to see all, click a point for its rollouts${run.numSteps > run.series.steps.length
        ? `; ${run.series.steps.length} of ${run.numSteps} steps are shown` : ""}</span>
    </div>
    <div class="charts">
      ${[...charts, ...own].map(({ title, lines }, index) => html`<${Chart} key=${title} title=${title} lines=${lines} axis=${axis} smoothing=${smoothing}
        sync=${`job ${run.id}`} onPick=${pick} height=${index ? 170 : innerWidth > 900 ? 412 : 230} note=${run.record?.step ? "the job has no such metric" : "no step yet"}
        onRemove=${index >= charts.length ? () => setAdded(added.filter((one) => one !== title)) : undefined} />`)}
    </div>
  </div>`;
}

/** @param {{axis: Axis, choose: (axis: Axis) => void}} props */
export function AxisChoice({ axis, choose }) {
  return html`<span class="choice" role="group" aria-label="axis">${Object.entries(AXES).map(([name, { label }]) =>
    html`<button aria-pressed=${axis === name} onClick=${() => choose(/** @type {Axis} */ (name))}>${label}</button>`)}</span>`;
}

/** @param {{names: string[], add: (name: string) => void}} props */
export function AddMetric({ names, add }) {
  const [text, setText] = useState("");
  const entry = names.includes(text) ? meaningOf(text) : "";
  return html`<span class="add">
    <input list="metric-names" placeholder="add a metric" aria-label="add a metric" value=${text}
      onInput=${(/** @type {any} */ event) => setText(event.target.value)}
      onKeyDown=${(/** @type {KeyboardEvent} */ event) => {
        if (event.key === "Enter" && names.includes(text)) {
          add(text);
          setText("");
        }
      }} />
    <datalist id="metric-names">${names.map((name) => html`<option value=${name}>${entryOf(name)?.group ?? ""}</option>`)}</datalist>
    <button disabled=${!names.includes(text)} onClick=${() => { add(text); setText(""); }}>add</button>
    ${entry && html`<small class="hint">${entry}</small>`}
  </span>`;
}
