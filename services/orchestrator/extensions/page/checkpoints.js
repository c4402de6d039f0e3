/** The checkpoints of a job that are on disk. */

import { html, useState } from "./lib.js";
import { get } from "./api.js";
import { Fault } from "./parts.js";
import { link, useRepeated } from "./state.js";
import { bytes, number, visible } from "./text.js";

const LOOK_MS = 15_000;

/** @param {{run: import("./live.js").Run}} props */
export function Checkpoints({ run }) {
  const [found, setFound] = useState(/** @type {any[] | null} */ (null));
  const [error, setError] = useState(/** @type {unknown} */ (null));
  useRepeated(() => {
    get(`v1/jobs/${run.id}/checkpoints`).then((list) => setFound(list.checkpoints)).catch(setError);
  }, LOOK_MS, [run.id]);
  const { steps, columns } = run.series;
  return html`<div>
    <${Fault} error=${error} />
    ${found && !found.length && html`<p class="none">no checkpoint yet</p>`}
    ${found && found.length > 0 && html`<div class="scrolls"><table>
      <thead><tr><th>step</th><th>reward</th><th>held-out reward</th><th>size</th><th>folder</th></tr></thead>
      <tbody>${found.map((one) => {
        const at = steps.indexOf(one.step);
        return html`<tr key=${one.step}><td><a href=${link(["jobs", run.id, "rollouts"], { step: one.step })}>${one.step}</a></td>
          <td>${number(columns.reward?.[at])}</td><td>${number(columns["eval/reward"]?.[at])}</td>
          <td>${bytes(one.size_bytes)}</td><td class="path">${visible(one.path)}</td></tr>`;
      })}</tbody></table></div>
    <p class="hint"><code>hone download ${run.id}</code> fetches the newest; plain transformers loads it.</p>`}
  </div>`;
}
