/** A box to ask the weights of the job that a sampler has now. */

import { html, useEffect, useState } from "./lib.js";
import { get, post } from "./api.js";
import { Fault, Text } from "./parts.js";
import { useRepeated } from "./state.js";
import { visible } from "./text.js";

const LOOK_MS = 5000;
const ANSWER_MS = 120_000;

/**
 * Returns the job's weights that can be asked: the adapter that has the job's name, and the weights
 * that a sampler serves for the job.
 * @param {string} id
 * @param {any[]} models of `GET /v1/models`
 * @param {any[]} services of `GET /v1/services`
 * @returns {{name: string, told: string}[]}
 */
export function askable(id, models, services) {
  // A call for "policy" goes to any sampler.
  const all = services.filter(({ sampler }) => sampler?.job_id && sampler.version !== null);
  const serving = all.every(({ sampler }) => sampler.job_id === id) ? all : [];
  const versions = [...new Set(serving.map(({ sampler }) => sampler.version))].sort((a, b) => a - b);
  const found = [];
  if (versions.length && models.some((one) => one.id === "policy")) found.push({ name: "policy", told: `weights of step ${versions.join(" or ")}, which serve now` });
  if (models.some((one) => one.id === id)) found.push({ name: id, told: "the job's newest adapter that a sampler keeps" });
  return found;
}

/** @param {{run: import("./live.js").Run}} props */
export function Talk({ run }) {
  const [models, setModels] = useState(/** @type {{name: string, told: string}[] | null} */ (null));
  const [error, setError] = useState(/** @type {unknown} */ (null));
  const [checkpoint, setCheckpoint] = useState(/** @type {any} */ (null));
  const [isChat, setChat] = useState(/** @type {boolean | null} */ (null));
  useRepeated(() => {
    Promise.all([get("v1/models"), get("v1/services")])
      .then(([list, { services }]) => setModels(askable(run.id, list.data, services)))
      .catch(() => setModels([]));
    get(`v1/jobs/${run.id}/checkpoints`).then(({ checkpoints }) => setCheckpoint(checkpoints[checkpoints.length - 1] ?? null)).catch(setError);
  }, LOOK_MS, [run.id]);
  useEffect(() => {
    get(`v1/jobs/${run.id}/rollouts`, { limit: 1 }).then((list) => setChat(typeof list.rollouts[0]?.prompt !== "string")).catch(() => setChat(true));
  }, [run.id]);
  return html`<div class="talk">
    <${Fault} error=${error} />
    ${!models && html`<p class="none">looking for a sampler that has the job's weights</p>`}
    ${models && !models.length && html`<p class="none">no sampler has this job's weights now${checkpoint ? html`; the checkpoint of step ${checkpoint.step} can be served anywhere: <code>vllm serve ${visible(checkpoint.path)}${run.record?.summary?.dtype ? ` --dtype ${run.record.summary.dtype}` : ""}</code>` : ""}</p>`}
    ${models && models.length > 0 && isChat !== null && html`<${Box} models=${models} isChat=${isChat} setChat=${setChat} most=${run.record.job.sampling.max_tokens} />`}
  </div>`;
}

/** @param {{models: {name: string, told: string}[], isChat: boolean, setChat: (value: boolean) => void, most: number}} props */
function Box({ models, isChat, setChat, most }) {
  const [name, setName] = useState(models[0].name);
  const [said, setSaid] = useState("");
  const [temperature, setTemperature] = useState("1");
  const [limit, setLimit] = useState(String(most));
  const [isAsking, setAsking] = useState(false);
  const [error, setError] = useState(/** @type {unknown} */ (null));
  const [turns, setTurns] = useState(/** @type {{role: string, content: string, note?: string}[]} */ ([]));
  const model = models.some((one) => one.name === name) ? name : models[0].name;
  /** @param {Event} event */
  const ask = async (event) => {
    event.preventDefault();
    const before = isChat ? turns.map(({ role, content }) => ({ role, content })) : [];
    const asked = { role: "user", content: said };
    const body = { model, max_tokens: Number(limit), temperature: Number(temperature) };
    setAsking(true);
    setError(null);
    try {
      const answer = isChat ? await post("v1/chat/completions", { ...body, messages: [...before, asked] }, AbortSignal.timeout(ANSWER_MS))
        : await post("v1/completions", { ...body, prompt: said }, AbortSignal.timeout(ANSWER_MS));
      const [choice] = answer.choices;
      const content = choice.text ?? choice.message?.content ?? "";
      const note = `${choice.finish_reason}, ${answer.usage?.completion_tokens ?? "?"} tokens`;
      setTurns([...turns, asked, { role: "assistant", content, note }]);
      setSaid("");
    } catch (problem) {
      setError(problem);
    }
    setAsking(false);
  };
  return html`<ol class="turns" aria-live="polite">${turns.map((turn, index) => html`<li key=${index} class=${turn.role}>
      <strong>${turn.role}</strong> <${Text} text=${turn.content} />${turn.note && html` <small>${visible(turn.note)}</small>`}</li>`)}</ol>
    <form onSubmit=${ask}>
      <label>weights <select value=${model} onChange=${(/** @type {any} */ event) => setName(event.target.value)}>${models.map((one) =>
        html`<option key=${one.name} value=${one.name}>${one.told}</option>`)}</select></label>
      <label>temperature <input type="number" min="0" max="2" step="0.1" value=${temperature} onInput=${(/** @type {any} */ event) => setTemperature(event.target.value)} /></label>
      <label>at most <input type="number" min="1" step="1" value=${limit} onInput=${(/** @type {any} */ event) => setLimit(event.target.value)} /> tokens</label>
      <label><input type="checkbox" checked=${isChat} onChange=${() => setChat(!isChat)} /> through the chat template</label>
      <label class="wide">what you say <textarea rows="4" required value=${said} onInput=${(/** @type {any} */ event) => setSaid(event.target.value)}></textarea></label>
      <${Fault} error=${error} />
      <button class="main" disabled=${isAsking || !said}>${isAsking ? "it samples…" : "ask"}</button>
      ${turns.length > 0 && html`<button type="button" onClick=${() => setTurns([])}>start over</button>`}
    </form>`;
}
