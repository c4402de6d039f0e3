/** One group: its prompt, and its completions with what each earned. */

import { html, useEffect, useState } from "./lib.js";
import { get } from "./api.js";
import { Conversation } from "./conversation.js";
import { Fault, Text } from "./parts.js";
import { Tokens } from "./tokens.js";
import { isIn, mean } from "./rollouts.js";
import { link, useChoice } from "./state.js";
import { brief, number, plain, visible } from "./text.js";

const COLOURS = ["text", "log-prob", "entropy", "trainer", "teacher"];

/** @param {{run: import("./live.js").Run, step: number, group: any, range: [number, number] | null, search: string}} props */
export function Group({ run, step, group, range, search }) {
  const [rollouts, setRollouts] = useState(/** @type {any[] | null} */ (null));
  const [error, setError] = useState(/** @type {unknown} */ (null));
  const [colour, setColour] = useChoice("colour", "text");
  useEffect(() => {
    const stop = new AbortController();
    get(`v1/jobs/${run.id}/rollouts`, { step, after: group.first, limit: Math.min(100, group.rewards.length), detail: true }, stop.signal)
      .then((list) => setRollouts(list.rollouts))
      .catch((problem) => stop.signal.aborted || setError(problem));
    return () => stop.abort();
  }, [run.id, step, group.first]);
  if (!rollouts) return html`<div class="group"><${Fault} error=${error} />${!error && html`<p class="none">loading the group</p>`}</div>`;
  const shown = rollouts
    .map((rollout, index) => ({ rollout, index }))
    .filter(({ rollout, index }) => (!range || isIn(rollout.reward, range)) && (!group.found.length || group.found.includes(index)))
    .sort((a, b) => (b.rollout.reward ?? -Infinity) - (a.rollout.reward ?? -Infinity));
  const first = rollouts[0];
  const row = Object.entries(first?.detail?.row ?? {});
  const why = rollouts.find((one) => one.detail?.no_tokens)?.detail.no_tokens;
  return html`<section class="group" aria-label=${`problem ${group.prompt_index}`}>
    <header>
      <h2>problem ${group.prompt_index}</h2>
      <span class="hint">mean ${number(mean(group.rewards))}, spread ${number(group.spread)}, weights of step ${group.versions.join(", ") || "?"}${group.replica ? `, sampler ${visible(group.replica)}` : ""}</span>
      <span class="choice" role="group" aria-label="colour of the tokens">${COLOURS.map((name) =>
        html`<button key=${name} aria-pressed=${colour === name} onClick=${() => setColour(name)}>${name}</button>`)}</span>
    </header>
    ${colour !== "text" && why && html`<p class="hint">${visible(why)}</p>`}
    <div class="prompt-box">${typeof first?.prompt === "string" ? html`<${Text} text=${first.prompt} marked=${search} />` : html`<${Conversation} messages=${first?.prompt ?? []} search=${search} />`}</div>
    ${row.length > 0 && html`<details class="row-of-data"><summary>the row that graders see</summary><dl>${row.map(([name, value]) =>
      html`<div key=${name}><dt>${visible(name)}</dt><dd><${Text} text=${plain(value)} cut=${400} /></dd></div>`)}</dl></details>`}
    <div class="completions">${shown.map(({ rollout, index }) => html`<${Completion} key=${index} rollout=${rollout} index=${index} colour=${colour} search=${search} />`)}</div>
    ${group.rewards.length > rollouts.length && html`<p class="hint">${rollouts.length} of ${group.rewards.length} rollouts are shown</p>`}
    <${OverSteps} run=${run} step=${step} index=${group.prompt_index} />
  </section>`;
}

/** @param {{rollout: any, index: number, colour: string, search: string}} props */
function Completion({ rollout, index, colour, search }) {
  const { detail } = rollout;
  const tokens = detail?.tokens;
  const isCut = rollout.finish_reason !== "stop";
  return html`<article class="completion" aria-label=${`completion ${index}, reward ${number(rollout.reward)}`}>
    <header>
      <strong class=${`reward ${rollout.reward === null ? "missing" : ""}`}>${rollout.reward === null ? "no reward" : number(rollout.reward)}</strong>
      <span title="advantage">A ${(rollout.advantage ?? 0) > 0 ? "+" : ""}${number(rollout.advantage)}</span>
      <span class=${isCut ? "cut" : ""}>${rollout.finish_reason}</span>
      <span>${detail?.num_tokens ?? "?"} tokens</span>
      <span>v${rollout.versions.join("→") || "?"}</span>
      ${rollout.turn_advantages.length > 0 && html`<span title="advantages of the turns">turns ${rollout.turn_advantages.map((/** @type {number | null} */ one) => number(one)).join(", ")}</span>`}
    </header>
    ${detail?.error && html`<p class="fault">${visible(detail.error)}</p>`}
    ${colour !== "text" && tokens ? html`<${Tokens} tokens=${tokens} by=${colour} />`
      : detail?.messages?.length ? html`<${Conversation} messages=${detail.messages} search=${search} />`
      : html`<div class="body"><${Text} text=${rollout.completion} marked=${search} /></div>`}
    ${rollout.forked.map((/** @type {string} */ why) => html`<p class="hint">its history was rewritten: ${visible(why)}</p>`)}
    <${Parts} parts=${rollout.parts} />
  </article>`;
}

/** @param {{parts: Record<string, any>}} props */
function Parts({ parts }) {
  return html`<ul class="parts">${Object.entries(parts).map(([name, part]) => html`<li key=${name}>
    <span class="part-name">${visible(name)}</span>
    <span class=${`verdict ${part.verdict}`}>${part.value === null ? part.verdict : number(part.value)}${part.value !== null && !["ok", "wrong"].includes(part.verdict) ? ` (${part.verdict})` : ""}</span>
    ${part.detail && html`<span class="why"><${Text} text=${part.detail} cut=${300} /></span>`}
    ${Object.entries(part.sub).map(([sub, value]) => html`<small>${visible(sub)} ${number(/** @type {number} */ (value))}</small>`)}
    ${part.errors.length > 0 && html`<small class="cut">${visible(part.errors.join(", "))}</small>`}
    ${part.stdout && html`<details><summary>it printed</summary><pre><${Text} text=${part.stdout} cut=${1500} /></pre></details>`}
    <small>${part.cached ? "cached" : brief(part.seconds)}</small>
  </li>`)}</ul>`;
}

/**
 * The same problem in other steps.
 * @param {{run: import("./live.js").Run, step: number, index: number}} props
 */
function OverSteps({ run, step, index }) {
  const [found, setFound] = useState(/** @type {any[] | null} */ (null));
  const [before, setBefore] = useState(/** @type {number | null} */ (null));
  const [error, setError] = useState(/** @type {unknown} */ (null));
  const look = () => {
    get(`v1/jobs/${run.id}/problems/${index}`, { before }).then((list) => {
      setFound([...(found ?? []), ...list.steps]);
      setBefore(list.next_before);
    }).catch(setError);
  };
  return html`<footer class="over-steps">
    <${Fault} error=${error} />
    ${found === null ? html`<button onClick=${look}>this problem in other steps</button>` : html`<table><thead><tr><th>step</th><th>mean</th><th>rewards</th></tr></thead>
      <tbody>${found.map((one) => html`<tr key=${one.step} class=${one.step === step ? "here" : ""}>
        <td><a href=${link(["jobs", run.id, "rollouts"], { step: one.step, group: one.group.first })}>${one.step}</a></td>
        <td>${number(mean(one.group.rewards))}</td><td>${one.group.rewards.map((/** @type {number | null} */ reward) => number(reward, 2)).join(" ")}</td></tr>`)}</tbody></table>
      ${before !== null && html`<button onClick=${look}>earlier steps</button>`}
      ${!found.length && before === null && html`<p class="hint">in no other stored step</p>`}`}
  </footer>`;
}
