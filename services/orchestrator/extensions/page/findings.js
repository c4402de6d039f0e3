/** Whether the job is well: the findings of `hone doctor JOB`. */

import { html, useState } from "./lib.js";
import { get, Problem } from "./api.js";
import { link, useRepeated } from "./state.js";
import { number, visible } from "./text.js";

const LOOK_MS = 30_000;

/** @param {{run: import("./live.js").Run}} props */
export function Findings({ run }) {
  const [found, setFound] = useState(/** @type {any[] | null} */ (null));
  const [isThere, setThere] = useState(true);
  useRepeated(() => {
    if (!isThere) return;
    get(`v1/jobs/${run.id}/findings`).then((list) => setFound(list.findings)).catch((error) => {
      setFound(null);
      if (error instanceof Problem && error.status === 404) setThere(false);
    });
  }, LOOK_MS, [run.id, isThere]);
  if (!found) return null;
  if (!found.length) return html`<p class="well"><span aria-hidden="true">✓</span> nothing is wrong, as far as this run's own data tells</p>`;
  return html`<section class="findings" aria-label="findings">${found.map((one) => html`<details key=${one.code} class=${one.level}>
    <summary><strong>${one.level}: ${visible(one.title)}</strong></summary>
    ${one.since_step !== null && html`<p><a href=${link(["jobs", run.id, "rollouts"], { step: one.since_step })}>since step ${one.since_step}</a></p>`}
    <ul>${one.evidence.map((/** @type {any} */ each) => html`<li><code>${visible(each.metric)}</code> ${visible(each.text)}
      ${each.values.map((/** @type {number} */ value, /** @type {number} */ index) => `${each.steps[index] === undefined ? "" : `step ${each.steps[index]}: `}${number(value)}`).join(", ")}</li>`)}</ul>
    <p><em>Cause:</em> ${visible(one.cause)}</p>
    <p><em>What to do:</em> ${visible(one.remedy)}</p>
  </details>`)}</section>`;
}
