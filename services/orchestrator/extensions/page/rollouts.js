/** The rollouts of a step: its groups by what there is to learn, and one group side by side. */

import { html, useEffect, useMemo, useState } from "./lib.js";
import { get } from "./api.js";
import { Group } from "./group.js";
import { Histogram } from "./histogram.js";
import { Fault, Rows } from "./parts.js";
import { link, useChoice } from "./state.js";
import { number, visible } from "./text.js";

/** @typedef {any} GroupSummary of the API */

/** Orders of the groups. */
const ORDERS = /** @type {Record<string, (group: GroupSummary) => number>} */ ({
  "most to learn": (group) => -(group.spread ?? -1),
  "lowest reward": (group) => mean(group.rewards) ?? Infinity,
  "highest reward": (group) => -(mean(group.rewards) ?? -Infinity),
  longest: (group) => -Math.max(...group.num_tokens),
  "as sampled": (group) => group.first,
});

/** @param {(number | null)[]} values */
export function mean(values) {
  const present = /** @type {number[]} */ (values.filter((value) => value !== null));
  return present.length ? present.reduce((sum, value) => sum + value, 0) / present.length : null;
}

/** @param {{run: import("./live.js").Run, parameters: URLSearchParams}} props */
export function Rollouts({ run, parameters }) {
  const asked = parameters.get("step");
  const chosen = parameters.get("group");
  const [search, setSearch] = useState("");
  const [typed, setTyped] = useState("");
  const [order, setOrder] = useChoice("groups-order", "most to learn");
  const [range, setRange] = useState(/** @type {[number, number] | null} */ (null));
  const [found, setFound] = useState(/** @type {any} */ (null));
  const [error, setError] = useState(/** @type {unknown} */ (null));
  const isNewest = asked === null;
  const newest = isNewest ? run.record.step : asked;
  useEffect(() => {
    const stop = new AbortController();
    get(`v1/jobs/${run.id}/rollouts/groups`, { step: asked, search }, stop.signal).then((list) => {
      setFound(list);
      setError(null);
    }).catch((problem) => stop.signal.aborted || setError(problem));
    return () => stop.abort();
  }, [run.id, newest, search]);
  useEffect(() => {
    const timer = setTimeout(() => setSearch(typed), 300);
    return () => clearTimeout(timer);
  }, [typed]);
  useEffect(() => setRange(null), [asked]);

  const groups = useMemo(() => {
    const shown = (found?.groups ?? []).filter((/** @type {GroupSummary} */ group) =>
      !range || group.rewards.some((/** @type {number | null} */ reward) => isIn(reward, range)));
    const by = ORDERS[order] ?? ORDERS["most to learn"];
    return shown.sort((/** @type {GroupSummary} */ a, /** @type {GroupSummary} */ b) => by(a) - by(b) || a.first - b.first);
  }, [found, order, range]);
  const rewards = useMemo(() => (found?.groups ?? []).flatMap((/** @type {GroupSummary} */ group) => group.rewards), [found]);
  if (!found) return html`<${Fault} error=${error} />${!error && html`<p class="none">loading the rollouts</p>`}`;

  const at = groups.find((/** @type {GroupSummary} */ group) => String(group.first) === chosen) ?? groups[0];
  /** @param {Record<string, string | number | null>} changes */
  const go = (changes) => (location.hash = link(["jobs", run.id, "rollouts"], { step: asked, group: chosen, ...changes }));
  return html`<div class="rollouts">
    <div class="bar-of-tools small">
      <${StepChoice} found=${found} isNewest=${isNewest} go=${(/** @type {number | null} */ step) => go({ step, group: null })} />
      <input type="search" placeholder="search prompts, completions, reasons" aria-label="search the text of the step" value=${typed}
        onInput=${(/** @type {any} */ event) => setTyped(event.target.value)} />
      <select aria-label="order of the groups" value=${order} onChange=${(/** @type {any} */ event) => setOrder(event.target.value)}>
        ${Object.keys(ORDERS).map((name) => html`<option value=${name}>${name}</option>`)}</select>
      <span class="hint">${groups.length} of ${found.groups.length} groups${found.dropped ? `; ${found.dropped} without signal were replaced` : ""}</span>
      ${range && html`<button onClick=${() => setRange(null)}>all rewards</button>`}
    </div>
    <${Fault} error=${error} />
    <div class="split">
      <div>
        <${Histogram} values=${rewards} range=${range} choose=${setRange} />
        <${Rows} rows=${groups} height=${52} label="groups" row=${(/** @type {GroupSummary} */ group) => html`<${GroupRow} key=${group.first} group=${group}
          isChosen=${group === at} onChoose=${() => go({ step: found.step, group: group.first })} />`} />
      </div>
      ${at ? html`<${Group} key=${`${found.step} ${at.first}`} run=${run} step=${found.step} group=${at} range=${range} search=${search} />`
        : html`<p class="none">no group has that</p>`}
    </div>
  </div>`;
}

/**
 * @param {number | null} reward
 * @param {[number, number]} range
 */
export function isIn(reward, range) {
  return reward !== null && reward >= range[0] && reward <= range[1];
}

/** @param {{found: any, isNewest: boolean, go: (step: number | null) => void}} props */
function StepChoice({ found, isNewest, go }) {
  const at = found.steps.indexOf(found.step);
  return html`<span class="steps">
    <button aria-label="the step before" disabled=${at <= 0} onClick=${() => go(found.steps[at - 1])}>‹</button>
    <label>step <input type="number" min=${found.steps[0]} max=${found.steps.at(-1)} value=${found.step}
      onChange=${(/** @type {any} */ event) => event.target.value && go(Number(event.target.value))} /></label>
    <button aria-label="the step after" disabled=${at < 0 || at >= found.steps.length - 1} onClick=${() => go(found.steps[at + 1])}>›</button>
    <button aria-pressed=${isNewest} onClick=${() => go(null)}>newest</button>
  </span>`;
}

/** @param {{group: GroupSummary, isChosen: boolean, onChoose: () => void}} props */
function GroupRow({ group, isChosen, onChoose }) {
  const told = `problem ${group.prompt_index}, mean reward ${number(mean(group.rewards))}, spread ${number(group.spread)}`;
  return html`<button class="group-row" aria-current=${isChosen ? "true" : undefined} title=${told} onClick=${onChoose}>
    <span class="prompt"><bdi>${visible(group.prompt.trim().replace(/\s+/g, " "))}</bdi></span>
    <span class="dots" aria-hidden="true">${group.rewards.slice(0, 32).map((/** @type {number | null} */ reward) =>
      html`<i class=${reward === null ? "missing" : ""} style=${{ height: `${reward === null ? 3 : 3 + 13 * Math.min(1, Math.max(0, reward))}px` }}></i>`)}</span>
    <small>mean ${number(mean(group.rewards))} · spread ${number(group.spread)}${group.spread === 0 ? " · no signal" : ""}${group.found.length ? ` · ${group.found.length} found` : ""}</small>
  </button>`;
}
