/** The tokens of a completion, coloured by a number of each. */

import { html, useState } from "./lib.js";
import { number, visible } from "./text.js";

const FIRST = 1500;

/**
 * Returns how strongly a token is coloured, 0 to 1: by its log-prob from likely (0) to rarer than
 * 1 in 400 (1), or by how far the teacher's log-prob is from the sampler's.
 * @param {any} tokens TokenColumns of the API
 * @param {string} by
 * @param {number} index
 * @returns {{strength: number, sign: string, told: string}}
 */
function shade(tokens, by, index) {
  const isSampled = !tokens.sampled.length || tokens.sampled[index] === 1;
  if (!isSampled) return { strength: 0, sign: "masked", told: "not sampled, so not trained on" };
  const own = tokens.logprobs[index];
  if (by === "teacher") {
    const other = tokens.teacher_logprobs[index];
    if (other === null || other === undefined || own === undefined) return { strength: 0, sign: "", told: "no teacher's log-prob" };
    const apart = other - own;
    return { strength: Math.min(1, Math.abs(apart) / 4), sign: apart < 0 ? "less" : "more", told: `teacher ${number(other)}, sampler ${number(own)} nats` };
  }
  if (own === undefined) return { strength: 0, sign: "", told: "its log-prob was not measured" };
  return { strength: Math.min(1, -own / 6), sign: "less", told: `log-prob ${number(own)} (probability ${number(Math.exp(own))})` };
}

/** @param {{tokens: any, by: string}} props */
export function Tokens({ tokens, by }) {
  const [end, setEnd] = useState(FIRST);
  const hasTeacher = tokens.teacher_logprobs.some((/** @type {number | null} */ one) => one !== null);
  if (by === "teacher" && !hasTeacher) return html`<p class="hint">the job has no teacher</p>`;
  return html`<div class="body tokens">${tokens.texts.slice(0, end).map((/** @type {string} */ text, /** @type {number} */ index) => {
    const { strength, sign, told } = shade(tokens, by, index);
    return html`<span key=${index} class=${`token ${sign} s${Math.round(strength * 8)}`} title=${`${index}: ${told}`}>${visible(text) || "∅"}</span>`;
  })}${tokens.texts.length > end && html`<button class="more" onClick=${() => setEnd(end * 4)}>show more (${tokens.texts.length - end} tokens are left)</button>`}
  ${tokens.num_left_out > 0 && html`<p class="hint">and ${tokens.num_left_out} tokens that are not shown one by one</p>`}
  <p class="legend hint">${by === "teacher" ? "orange: the teacher finds it less likely; blue: more likely" : "the darker, the less likely the token was to the sampler"}; dimmed: not sampled</p></div>`;
}
