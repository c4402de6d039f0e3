/** The tokens of a completion, coloured by a number of each. */

import { html, useState } from "./lib.js";
import { number, visible } from "./text.js";

const FIRST = 1500;

/** @type {Record<string, string>} */
const LEGENDS = {
  "log-prob": "the darker, the less likely the token was to the sampler",
  entropy: "the darker, the less certain the policy was of the token",
  trainer: "orange: the trainer finds it less likely than the sampler did; blue: more likely; darkest at 0.1 nats",
  teacher: "orange: the teacher finds it less likely than the sampler did; blue: more likely",
};

/** Log-probs of another model, by the name of the choice: their column, whose they are, and how many
 * nats apart are the strongest colour. Sampler and trainer have the same weights, and hardly differ.
 * @type {Record<string, {column: string, whose: string, nats: number}>} */
const OTHERS = {
  teacher: { column: "teacher_logprobs", whose: "teacher", nats: 4 },
  trainer: { column: "trainer_logprobs", whose: "trainer", nats: 0.1 },
};

/**
 * Returns how strongly a token is coloured, 0 to 1: by its log-prob from likely (0) to rarer than
 * 1 in 400 (1), by the entropy from certain (0) to 3 nats (1), or by how far another model's
 * log-prob is from the sampler's.
 * @param {any} tokens TokenColumns of the API
 * @param {string} by
 * @param {number} index
 * @returns {{strength: number, sign: string, told: string}}
 */
function shade(tokens, by, index) {
  const isSampled = !tokens.sampled.length || tokens.sampled[index] === 1;
  if (!isSampled) return { strength: 0, sign: "masked", told: "not sampled, so not trained on" };
  const own = tokens.logprobs[index];
  if (by === "entropy") {
    const nats = tokens.entropies[index] ?? null;
    if (nats === null) return { strength: 0, sign: "", told: "not trained on" };
    return { strength: Math.min(1, nats / 3), sign: "less", told: `entropy ${number(nats)} nats` };
  }
  if (by in OTHERS) {
    const { column, whose, nats } = OTHERS[by];
    const other = tokens[column][index] ?? null;
    if (other === null || own === undefined) return { strength: 0, sign: "", told: `no log-prob of the ${whose}` };
    const apart = other - own;
    return { strength: Math.min(1, Math.abs(apart) / nats), sign: apart < 0 ? "less" : "more", told: `${whose} ${number(other)}, sampler ${number(own)}, ${number(apart)} nats apart` };
  }
  if (own === undefined) return { strength: 0, sign: "", told: "its log-prob was not measured" };
  return { strength: Math.min(1, -own / 6), sign: "less", told: `log-prob ${number(own)} (probability ${number(Math.exp(own))})` };
}

/** @param {{tokens: any, by: string}} props */
export function Tokens({ tokens, by }) {
  const [end, setEnd] = useState(FIRST);
  const needed = by === "entropy" ? tokens.entropies : by in OTHERS ? tokens[OTHERS[by].column] : tokens.texts;
  const isKnown = needed.some((/** @type {number | string | null} */ one) => one !== null);
  if (!isKnown) return html`<p class="hint">${by === "teacher" ? "the job has no teacher" : "no token of this completion was trained on, as far as is stored"}</p>`;
  return html`<div class="body tokens">${tokens.texts.slice(0, end).map((/** @type {string} */ text, /** @type {number} */ index) => {
    const { strength, sign, told } = shade(tokens, by, index);
    return html`<span key=${index} class=${`token ${sign} s${Math.round(strength * 8)}`} title=${`${index}: ${told}`}>${visible(text) || "∅"}</span>`;
  })}${tokens.texts.length > end && html`<button class="more" onClick=${() => setEnd(end * 4)}>show more (${tokens.texts.length - end} tokens are left)</button>`}
  ${tokens.num_left_out > 0 && html`<p class="hint">and ${tokens.num_left_out} tokens that are not shown one by one</p>`}
  <p class="legend hint">${LEGENDS[by]}; dimmed: not sampled</p></div>`;
}
