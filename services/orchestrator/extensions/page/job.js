/** The page of one job. */

import { html, useState } from "./lib.js";
import { Actions } from "./actions.js";
import { Charts } from "./charts.js";
import { Checkpoints } from "./checkpoints.js";
import { Events } from "./events.js";
import { Findings } from "./findings.js";
import { Fault, Progress, Status, Text } from "./parts.js";
import { Rollouts } from "./rollouts.js";
import { useRun } from "./live.js";
import { Weights } from "./samplers.js";
import { Talk } from "./talk.js";
import { isReadOnly, link } from "./state.js";
import { clock, duration, number, visible } from "./text.js";

const TABS = ["charts", "rollouts", "events", "weights", "checkpoints", "talk", "job"];

/** @param {{id: string, tab: string, parameters: URLSearchParams}} props */
export function JobPage({ id, tab, parameters }) {
  const [turn, setTurn] = useState(0);
  const run = useRun(id, turn);
  const { record } = run;
  if (!record) {
    return html`<main id="main"><p><a href="#/jobs">← jobs</a></p><${Fault} error=${run.error} />${!run.error && html`<p class="none">loading ${id}</p>`}</main>`;
  }
  return html`<main id="main">
    <header class="job-head">
      <a class="back" href="#/jobs" aria-label="all jobs">←</a>
      <h1><bdi>${visible(record.name)}</bdi></h1>
      <${Status} status=${record.status} />
      <${Progress} value=${record.step} of=${record.steps} />
      <${Facts} record=${record} />
      <${Actions} record=${record} changed=${() => setTurn(turn + 1)} />
    </header>
    <${Doing} run=${run} />
    <${Findings} run=${run} />
    <nav class="tabs" aria-label="views of the job">${TABS.filter((name) => name !== "talk" || !isReadOnly()).map((name) =>
      html`<a href=${link(["jobs", id, name])} aria-current=${name === tab ? "page" : undefined}>${name}</a>`)}</nav>
    ${tab === "rollouts" ? html`<${Rollouts} run=${run} parameters=${parameters} />`
      : tab === "events" ? html`<${Events} run=${run} />`
      : tab === "weights" ? html`<${Weights} run=${run} />`
      : tab === "checkpoints" ? html`<${Checkpoints} run=${run} />`
      : tab === "talk" ? html`<${Talk} run=${run} />`
      : tab === "job" ? html`<${Definition} record=${record} />`
      : html`<${Charts} run=${run} />`}
  </main>`;
}

/** @param {{record: any}} props */
function Facts({ record }) {
  /** @type {[string, string | null][]} */
  const facts = [
    ["reward", record.reward === null ? null : number(record.reward)],
    ["time left", record.status === "running" && record.eta_s !== null ? duration(record.eta_s) : null],
    ["took", record.started_at && record.finished_at ? duration(record.finished_at - record.started_at) : null],
    ["cost", record.cost === null ? null : `${number(record.cost)} ${record.currency}`],
    ["place in the queue", record.place === null ? null : String(record.place)],
    ["recoveries", record.recoveries ? String(record.recoveries) : null],
  ];
  return html`<dl class="facts">${facts.filter(([, value]) => value !== null).map(([name, value]) =>
    html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

/** @param {{run: import("./live.js").Run}} props */
function Doing({ run }) {
  const { record } = run;
  const obstacles = Object.entries(record.waits_for ?? {}).map(([trainer, why]) =>
    `${trainer} ${/** @type {any} */ (why).job ? `is taken by ${/** @type {any} */ (why).job}` : `takes no job: ${/** @type {any} */ (why).away}`}`);
  const said = [run.doing || record.doing || record.waits, record.stopped, record.error, ...obstacles, ...(record.warnings ?? [])].filter(Boolean);
  return html`<div class="doing" aria-live="polite">
    ${said.map((one) => html`<p>${visible(one)}</p>`)}
    ${run.isLost && html`<p class="warning">the connection is lost; this page continues automatically once the orchestrator answers</p>`}
  </div>`;
}

/** @param {{record: any}} props */
function Definition({ record }) {
  const facts = [
    ["id", record.id], ["model", record.model], ["run folder", record.run_dir], ["trainer", record.trainer ?? "none yet"],
    ["submitted", clock(record.created_at)], ["began", clock(record.started_at)], ["ended", clock(record.finished_at)],
    ...Object.entries(record.data).map(([name, version]) => [`data: ${name}`, version]),
    ...Object.entries(record.metadata).map(([name, value]) => [`metadata: ${name}`, value]),
  ];
  return html`<div class="definition">
    <dl>${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${visible(String(value))}</dd></div>`)}</dl>
    <h2>The job ${!isReadOnly() && html`<a class="button" href=${link(["new"], { like: record.id })}>start another like it</a>`}</h2>
    <pre tabindex="0"><${Text} text=${JSON.stringify(record.job, null, 2)} cut=${20000} /></pre>
    ${record.summary && html`<h2>Its result</h2><pre tabindex="0"><${Text} text=${JSON.stringify(record.summary, null, 2)} cut=${20000} /></pre>`}
  </div>`;
}
