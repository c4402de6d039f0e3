/** Columns of metrics, and what charts make of them. Pure. */

/**
 * A run's metrics: a value of each loaded metric at each step, null where the step lacks it.
 * @typedef {{steps: number[], columns: Record<string, (number | null)[]>}} Series
 */

/** @typedef {"step" | "time" | "tokens"} Axis */

/**
 * One line of a chart. `steps` are the steps of its points.
 * @typedef {{
 *   label: string, metric?: string, colour: number, x: number[], y: (number | null)[], steps: number[],
 *   low?: (number | null)[], high?: (number | null)[], points?: boolean, dash?: boolean, fill?: boolean,
 *   unit?: string, own?: (number | null)[],
 * }} Line
 * `own` are a stacked line's values without the lines below it.
 */

/** The columns that the axes need. */
export const AXES = /** @type {Record<Axis, {label: string, metric: string | null}>} */ ({
  step: { label: "step", metric: null },
  time: { label: "time", metric: "total/hours" },
  tokens: { label: "tokens", metric: "total/tokens" },
});

/**
 * Returns a series with the row added, if it is a later step than the last; a row of a step that is
 * there replaces that row and what followed it, because the job went back to a checkpoint.
 * @param {Series} series
 * @param {number} step
 * @param {Record<string, number>} metrics
 * @returns {Series}
 */
export function withRow(series, step, metrics) {
  let kept = series.steps.length;
  while (kept > 0 && series.steps[kept - 1] >= step) kept -= 1;
  const columns = Object.fromEntries(
    Object.entries(series.columns).map(([name, values]) => [name, [...values.slice(0, kept), metrics[name] ?? null]]),
  );
  return { steps: [...series.steps.slice(0, kept), step], columns };
}

/**
 * Returns the x value of each step: the step, the hours or the tokens since the job began. Where a
 * step lacks them they continue from the step before.
 * @param {Series} series
 * @param {Axis} axis
 */
export function axisOf(series, axis) {
  const metric = AXES[axis].metric;
  if (!metric) return series.steps;
  let last = 0;
  return (series.columns[metric] ?? series.steps.map(() => null)).map((value) => (last = value ?? last));
}

/**
 * Returns the exponential moving average, corrected for its start at nothing, so that the first
 * values are not pulled to 0. Missing values stay missing.
 * @param {(number | null)[]} values
 * @param {number} weight of the past, 0 (none) to below 1
 */
export function smoothed(values, weight) {
  if (weight <= 0) return values;
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

/**
 * Returns the line of a metric without the points that lack it; null if none has it.
 * @param {Series} series
 * @param {Axis} axis
 * @param {string} metric
 * @param {Partial<Line> & {band?: [string, string]}} [look]
 * @returns {Line | null}
 */
export function lineOf(series, axis, metric, look = {}) {
  const values = series.columns[metric];
  if (!values) return null;
  const at = values.flatMap((value, index) => (value === null || value === undefined ? [] : [index]));
  if (!at.length) return null;
  const xs = axisOf(series, axis);
  const { band, ...rest } = look;
  /** @param {string} name */
  const bound = (name) => at.map((index) => series.columns[name]?.[index] ?? null);
  const found = band ? { low: bound(band[0]), high: bound(band[1]) } : {};
  return {
    label: metric, metric, colour: 0, ...rest, ...(found.low?.some((value) => value !== null) ? found : {}),
    x: at.map((index) => xs[index]), y: at.map((index) => values[index]), steps: at.map((index) => series.steps[index]),
  };
}

/** The rates that `withRates` adds. */
export const RATES = ["sampled tokens per second", "trained tokens per second"];

/**
 * Returns the series with the tokens per second of each step: sampled and trained ones, each over
 * all of the step's time. How many were sampled is known of steps whose step before is loaded too.
 * @param {Series} series
 */
export function withRates(series) {
  const seconds = series.columns["time/step"];
  if (!seconds) return series;
  const sums = series.columns["total/tokens"] ?? [];
  const sampled = series.steps.map((step, index) => {
    const before = step === 1 ? 0 : series.steps[index - 1] === step - 1 ? (sums[index - 1] ?? null) : null;
    const now = sums[index] ?? null;
    return now === null || before === null ? null : now - before;
  });
  const of = [sampled, series.columns.num_tokens ?? []];
  const rates = of.map((tokens) => seconds.map((time_s, index) => {
    const count = tokens[index] ?? null;
    return count === null || !time_s ? null : count / time_s;
  }));
  return { ...series, columns: { ...series.columns, [RATES[0]]: rates[0], [RATES[1]]: rates[1] } };
}

/**
 * Returns whether every value of the lines is 0, of which a chart would show nothing.
 * @param {Line[]} lines
 */
export function isZero(lines) {
  return lines.length > 0 && lines.every((line) => line.y.every((value) => value === 0 || value === null));
}

/**
 * Returns the keys of the documents in which they differ, with the value of each, such as
 * `training.learning_rate`. A key that one lacks is undefined there.
 * @param {Record<string, any>[]} documents
 * @returns {[string, unknown[]][]}
 */
export function differences(documents) {
  /** @param {any} value @param {string} at @returns {[string, unknown][]} */
  const flat = (value, at) => (value !== null && typeof value === "object" && !Array.isArray(value)
    ? Object.entries(value).flatMap(([key, inner]) => flat(inner, at ? `${at}.${key}` : key)) : [[at, value]]);
  const all = documents.map((document) => new Map(flat(document, "")));
  const keys = [...new Set(all.flatMap((one) => [...one.keys()]))].sort();
  return keys.map((key) => /** @type {[string, unknown[]]} */ ([key, all.map((one) => one.get(key))]))
    .filter(([, values]) => new Set(values.map((value) => JSON.stringify(value))).size > 1);
}

/**
 * Returns the lines, each with those before it added, for a stacked chart.
 * @param {Line[]} lines of the same steps
 */
export function stacked(lines) {
  const total = new Map();
  return lines.map((line) => ({
    ...line,
    fill: true,
    own: line.y,
    y: line.y.map((value, index) => {
      const sum = (total.get(line.x[index]) ?? 0) + (value ?? 0);
      total.set(line.x[index], sum);
      return sum;
    }),
  }));
}

/**
 * Returns the lines as CSV: a row per x, a column per line.
 * @param {Line[]} lines
 * @param {string} axis
 */
export function csv(lines, axis) {
  /** @param {string} text */
  const cell = (text) => (/[",\n]|^[=+\-@]/.test(text) && Number.isNaN(Number(text)) ? `"${text.replaceAll('"', '""')}"` : text);
  const at = lines.map((line) => new Map(line.x.map((x, index) => [x, (line.own ?? line.y)[index]])));
  const xs = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const rows = xs.map((x) => [x, ...at.map((values) => values.get(x) ?? "")]);
  const head = [axis, ...lines.map((line) => line.label)];
  return `${[head, ...rows].map((row) => row.map((value) => cell(String(value))).join(",")).join("\n")}\n`;
}
