/** What can be done with a job, each with the sentence that says what it does. */

import { html, useState } from "./lib.js";
import { post, remove } from "./api.js";
import { Dialog, Fault } from "./parts.js";
import { hasEnded } from "./live.js";
import { isReadOnly } from "./state.js";

/**
 * @typedef {{
 *   name: string, does: string, danger?: boolean, isPossible: (record: any) => boolean,
 *   act: (record: any, form: {set: string, files: boolean}) => Promise<any>,
 * }} Action
 */

/** @type {Action[]} */
const ACTIONS = [
  {
    name: "pause",
    does: "Pauses the job: now if it is queued, within seconds if it runs. What it has done stays, and its trainer is free for the next job.",
    isPossible: (record) => ["queued", "running"].includes(record.status) && !record.pause_requested,
    act: (record) => post(`v1/jobs/${record.id}/pause`),
  },
  {
    name: "resume",
    does: "Queues the job again. It continues where it was, with other memory settings, steps and the like if you name them: keys that change what is learned are refused.",
    isPossible: (record) => record.status === "paused" || record.pause_requested,
    act: (record, { set }) => post(`v1/jobs/${record.id}/resume`, { set: set.split("\n").map((line) => line.trim()).filter(Boolean) }),
  },
  {
    name: "cancel",
    does: "Ends the job for good: now if it is queued or paused, within seconds if it runs. Its run folder and checkpoints stay.",
    danger: true,
    isPossible: (record) => !hasEnded(record) && !record.cancel_requested,
    act: (record) => post(`v1/jobs/${record.id}/cancel`),
  },
  {
    name: "delete",
    does: "Forgets the job and its events. Its run folder and checkpoints stay, unless you remove them too.",
    danger: true,
    isPossible: hasEnded,
    act: (record, { files }) => remove(`v1/jobs/${record.id}?files=${files}`),
  },
];

/** @param {{record: any, changed: () => void}} props */
export function Actions({ record, changed }) {
  const [asked, setAsked] = useState(/** @type {Action | null} */ (null));
  if (isReadOnly()) return null;
  return html`<span class="actions">
    ${ACTIONS.filter((action) => action.isPossible(record)).map((action) =>
      html`<button key=${action.name} title=${action.does} onClick=${() => setAsked(action)}>${action.name}</button>`)}
    ${asked && html`<${Confirm} action=${asked} record=${record} close=${() => setAsked(null)} changed=${changed} />`}
  </span>`;
}

/** @param {{action: Action, record: any, close: () => void, changed: () => void}} props */
function Confirm({ action, record, close, changed }) {
  const [set, setSet] = useState("");
  const [files, setFiles] = useState(false);
  const [error, setError] = useState(/** @type {unknown} */ (null));
  const [isBusy, setBusy] = useState(false);
  const act = async () => {
    setBusy(true);
    try {
      await action.act(record, { set, files });
      close();
      if (action.name === "delete") location.hash = "#/jobs";
      else changed();
    } catch (problem) {
      setError(problem);
      setBusy(false);
    }
  };
  return html`<${Dialog} title=${`${action.name} ${record.name}`} onClose=${close}>
    <p>${action.does}</p>
    ${action.name === "resume" && html`<label class="wide">changes, a line each<textarea rows="3" spellcheck="false" placeholder="steps=80&#10;memory.micro_batch_tokens=4096"
      value=${set} onInput=${(/** @type {any} */ event) => setSet(event.target.value)}></textarea></label>`}
    ${action.name === "delete" && html`<label><input type="checkbox" checked=${files} onChange=${() => setFiles(!files)} /> remove ${record.run_dir} with its checkpoints too</label>`}
    <${Fault} error=${error} />
    <footer><button onClick=${close}>leave it</button>
      <button class=${action.danger ? "danger" : "main"} disabled=${isBusy} onClick=${act}>${action.name}</button></footer>
  </${Dialog}>`;
}
