/** What the metrics mean: the text of docs/observability.md, which is written from the same file. */

/** @typedef {{name: string, group: string, unit?: string, means: string}} Meaning */

/** @type {Meaning[]} */
let meanings = [];

export async function loadMeanings() {
  const response = await fetch("page/meanings.json");
  if (response.ok) meanings = await response.json();
}

/**
 * Returns the entry of a metric; a name in angle brackets stands for anything.
 * @param {string} metric
 * @returns {Meaning | undefined}
 */
export function entryOf(metric) {
  return meanings.find((one) => one.name === metric) ?? meanings.find((one) => {
    const parts = one.name.split(/<[^>]*>/).map((part) => part.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&"));
    return parts.length > 1 && new RegExp(`^${parts.join(".+")}$`).test(metric);
  });
}

/** @param {string} metric */
export function meaningOf(metric) {
  const found = entryOf(metric);
  if (metric === "trained tokens per second") return "num_tokens over time/step: what the step trained on, over all of its time.";
  if (metric === "sampled tokens per second") return "What total/tokens grew by, over time/step: what was sampled for the step, over all of its time.";
  if (!found) return "a metric of the job's own";
  return found.unit ? `${found.means} (${found.unit})` : found.means;
}
