/** A histogram of a step's rewards. A bar filters the groups. */

import { html } from "./lib.js";
import { number } from "./text.js";

const NUM_BINS = 12;

/**
 * Returns the bins of the values: their bounds, both included, and how many values are in each. Few
 * different values have a bin each.
 * @param {(number | null)[]} values
 * @returns {{range: [number, number], count: number}[]}
 */
export function binned(values) {
  const present = /** @type {number[]} */ (values.filter((value) => value !== null)).sort((a, b) => a - b);
  const different = [...new Set(present)];
  if (different.length <= NUM_BINS) {
    return different.map((value) => ({ range: [value, value], count: present.filter((one) => one === value).length }));
  }
  const [low, high] = [present[0], present[present.length - 1]];
  const width = (high - low) / NUM_BINS;
  const bins = Array.from({ length: NUM_BINS }, () => /** @type {number[]} */ ([]));
  for (const value of present) bins[Math.min(NUM_BINS - 1, Math.floor((value - low) / width))].push(value);
  return bins.filter((own) => own.length).map((own) => ({ range: [own[0], own[own.length - 1]], count: own.length }));
}

/**
 * @param {{values: (number | null)[], range: [number, number] | null, choose: (range: [number, number] | null) => void}} props
 */
export function Histogram({ values, range, choose }) {
  const bins = binned(values);
  const most = Math.max(1, ...bins.map((bin) => bin.count));
  const missing = values.filter((value) => value === null).length;
  return html`<div class="histogram" role="group" aria-label="rewards of the step">
    ${bins.map((bin) => {
      const [low, high] = bin.range;
      const name = low === high ? number(low) : `${number(low)} to ${number(high)}`;
      const isChosen = range !== null && range[0] === low && range[1] === high;
      return html`<button key=${name} aria-pressed=${isChosen} title=${`reward ${name}: ${bin.count} rollouts`} aria-label=${`reward ${name}: ${bin.count} rollouts`}
        onClick=${() => choose(isChosen ? null : bin.range)}>
        <span class="count" data-text=${bin.count}></span><span class="column" style=${{ height: `${4 + (bin.count / most) * 46}px` }}></span><small data-text=${number(low, 2)}></small></button>`;
    })}
    ${missing > 0 && html`<span class="hint">${missing} without a reward</span>`}
  </div>`;
}
