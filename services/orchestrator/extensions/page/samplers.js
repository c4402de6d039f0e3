/** The services: their registrations and readiness; and how a job's weights reach its samplers. */

import { html, useState } from "./lib.js";
import { get } from "./api.js";
import { Chart } from "./chart.js";
import { Fault } from "./parts.js";
import { link, useRepeated } from "./state.js";
import { bytes, clock, number, visible } from "./text.js";

const LOOK_MS = 5000;

export function Services() {
  const [ready, setReady] = useState(/** @type {any} */ (null));
  const [samplers, setSamplers] = useState(/** @type {any[]} */ ([]));
  const [services, setServices] = useState(/** @type {any[] | null} */ (null));
  const [error, setError] = useState(/** @type {unknown} */ (null));
  useRepeated(() => {
    fetch("readyz").then((response) => response.json()).then(setReady).catch(setError);
    get("v1/services").then((list) => setServices(list.services)).catch(setError);
    get("v1/samplers").then((list) => setSamplers(list.samplers)).catch(setError);
  }, LOOK_MS, []);
  return html`<main id="main"><h1>Services</h1><${Fault} error=${error} />
    ${ready?.dependencies && html`<h2>This orchestrator</h2><ul class="ready">${Object.entries(ready.dependencies).map(([name, one]) => {
      const { ok, detail } = /** @type {any} */ (one);
      return html`<li class=${ok ? "ok" : "bad"}><span aria-hidden="true">${ok ? "✓" : "✕"}</span> ${name}: ${visible(detail)}</li>`;
    })}</ul>`}
    <h2>Trainer, samplers, reward service</h2>
    ${services && html`<div class="scrolls"><table><thead><tr><th>service</th><th>answered</th><th>job</th><th>version</th><th title="of the bytes that it read itself">digest, proven</th><th title="completions under way, of the most that it samples at once">queue</th><th title="tokens of the prompts and completions under way, of the most that the cache can hold">cache</th><th>memory</th><th>doing</th></tr></thead>
      <tbody>${services.map((one) => html`<${ServiceRow} key=${one.service + one.url} one=${one} />`)}</tbody></table></div>`}
    <p class="hint">A job's page shows how its weights reach each sampler, under “weights”.</p>
    ${samplers.length > 0 && html`<h2>Samplers that registered themselves</h2><div class="scrolls"><table><thead><tr><th>sampler</th><th>address</th><th>job</th><th>version</th><th>last heartbeat</th></tr></thead>
      <tbody>${samplers.map((one) => html`<tr key=${one.replica}><td>${visible(one.replica)}</td><td>${visible(one.url)}</td>
        <td>${one.job_id && html`<a href=${link(["jobs", one.job_id])}>${one.job_id}</a>`}</td><td>${one.version ?? "–"}</td><td>${clock(one.expires_at - one.lease_s)}</td></tr>`)}</tbody></table></div>`}
  </main>`;
}

/** @param {{one: any}} props */
function ServiceRow({ one }) {
  const { sampler, trainer, gauges } = one;
  const state = sampler ?? trainer;
  const running = gauges.running_requests;
  const cache = sampler?.kv_cache_tokens ? gauges.running_tokens / sampler.kv_cache_tokens : null;
  return html`<tr><td class=${one.error ? "bad" : "ok"}><span aria-hidden="true">${one.error ? "✕" : "✓"}</span> ${one.service === "rollout" ? "sampler" : one.service} ${visible(sampler?.replica || one.url)}</td>
    <td>${one.answered_at ? clock(one.answered_at) : "never"}</td>
    <td>${state?.job_id && html`<a href=${link(["jobs", state.job_id])}>${state.job_id}</a>`}</td>
    <td>${(sampler ? sampler.version : trainer?.step) ?? "–"}</td>
    <td class="path">${sampler?.digest ?? "–"}</td>
    <td>${sampler && running !== undefined ? `${running}${sampler.max_num_seqs ? ` of ${sampler.max_num_seqs}` : ""}` : "–"}</td>
    <td>${cache === null || Number.isNaN(cache) ? "–" : `${number(100 * cache, 2)} %`}</td>
    <td>${gauges.memory_bytes ? bytes(gauges.memory_bytes) : "–"}</td>
    <td>${visible(one.error ?? state?.doing ?? state?.taken ?? "")}</td></tr>`;
}

/** @param {{run: import("./live.js").Run}} props */
export function Weights({ run }) {
  const [syncs, setSyncs] = useState(/** @type {any[] | null} */ (null));
  const [error, setError] = useState(/** @type {unknown} */ (null));
  useRepeated(() => {
    get(`v1/jobs/${run.id}/syncs`, { last: 500 }).then((list) => setSyncs(list.syncs)).catch(setError);
  }, LOOK_MS, [run.id]);
  if (!syncs) return html`<${Fault} error=${error} />`;
  if (!syncs.length) return html`<p class="none">no version of the weights was sent yet</p>`;
  const names = [...new Set(syncs.flatMap((sync) => sync.samplers.map((/** @type {any} */ one) => one.replica)))];
  const x = syncs.map((sync) => sync.version);
  /** @param {string} name */
  const paused = (name) => syncs.map((sync) => sync.samplers.find((/** @type {any} */ one) => one.replica === name)?.paused_s ?? null);
  const common = { x, steps: x };
  const lines = [{ ...common, label: "publish to serving", colour: 0, y: syncs.map((sync) => sync.seconds) },
    ...names.map((name, index) => ({ ...common, label: `pause of ${visible(name)}`, colour: index + 1, y: paused(name) }))];
  const newest = [...syncs].reverse().slice(0, 50);
  return html`<div>
    <p class="hint">A version counts as served only once each sampler has answered with it and with a digest of the bytes it read itself.</p>
    <div class="charts even"><${Chart} title="seconds of a sync" lines=${lines} axis="step" /></div>
    <div class="scrolls"><table><thead><tr><th>version</th><th>method</th><th>size</th><th>seconds</th><th>digest, proven</th><th>sampler</th><th>pause</th><th>received</th><th title="mean distance to the trainer's log-probs on the canary">canary</th></tr></thead>
      <tbody>${newest.flatMap((sync) => sync.samplers.map((/** @type {any} */ one, /** @type {number} */ index) => html`<tr key=${`${sync.version} ${one.replica}`}>
        <td>${index ? "" : sync.version}</td><td>${sync.method}</td><td>${bytes(sync.size_bytes)}</td><td>${number(sync.seconds)}</td><td class="path">${sync.digest}</td>
        <td>${visible(one.replica)}</td><td>${number(one.paused_s)} s</td><td>${bytes(one.received_bytes)}</td><td>${number(one.canary_difference, 2)}</td></tr>`))}</tbody></table></div>
  </div>`;
}
