/** A chart: uPlot in a card with its legend, its meaning, and files of what it shows. */

import { html, uPlot, useEffect, useRef, useState } from "./lib.js";
import { csv, isZero, smoothed } from "./series.js";
import { number, duration } from "./text.js";
import { meaningOf } from "./meanings.js";
import { download } from "./files.js";

/** @typedef {import("./series.js").Line} Line */
/** @typedef {import("./series.js").Axis} Axis */

/**
 * @param {string} name of a CSS variable
 */
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/**
 * @param {number} index
 * @param {number} [alpha]
 */
function lineColour(index, alpha = 1) {
  const value = colour(`--line-${index % 8}`);
  return alpha === 1 ? value : value + Math.round(alpha * 255).toString(16).padStart(2, "0");
}

/**
 * @param {Axis} axis
 * @param {number} value
 */
export function shownX(axis, value) {
  return axis === "time" ? duration(value * 3600) : number(value, 4);
}

/**
 * Returns the data and the look of the lines: with smoothing each line has its raw values, faint,
 * behind it; a band has its two bounds.
 * @param {Line[]} lines
 * @param {number} smoothing
 */
function prepared(lines, smoothing) {
  /** @type {any[]} */
  const tables = [];
  /** @type {any[]} */
  const series = [];
  /** @type {any[]} */
  const bands = [];
  lines.forEach((line, index) => {
    const isSmooth = smoothing > 0 && !line.fill && !line.points;
    const points = { show: Boolean(line.points) || line.x.length < 3, size: 5 };
    const look = { label: line.label, stroke: lineColour(line.colour), spanGaps: true, width: 1.75, points };
    if (line.low && line.high) {
      tables.push([line.x, line.high], [line.x, line.low]);
      const bound = { stroke: lineColour(line.colour, 0.35), width: 0.75, spanGaps: true, points: { show: false } };
      series.push({ ...bound, label: `${line.label} (high)`, class: "bound" }, { ...bound, label: `${line.label} (low)`, class: "bound" });
      bands.push({ series: [series.length - 1, series.length], fill: lineColour(line.colour, 0.18) });
    }
    if (isSmooth) {
      tables.push([line.x, line.y]);
      series.push({ ...look, label: `${line.label} (raw)`, stroke: lineColour(line.colour, 0.3), width: 1, class: "bound", points: { show: false } });
    }
    tables.push([line.x, isSmooth ? smoothed(line.y, smoothing) : line.y]);
    series.push({ ...look, ...(line.dash ? { dash: [5, 4] } : {}) });
    if (line.fill) {
      const below = index ? { band: true } : { fill: lineColour(line.colour, 0.45) };
      if (index) series[series.length - 1].below = series.length - 1;
      if (below.band) bands.push({ series: [series.length, series.length - 1], fill: lineColour(line.colour, 0.45) });
      else series[series.length - 1].fill = below.fill;
    }
  });
  return { data: tables.length ? uPlot.join(tables) : [[]], series, bands };
}

/**
 * @param {{
 *   title: string, lines: Line[], axis: Axis, smoothing?: number, sync?: string, height?: number,
 *   onPick?: (step: number) => void, note?: string, onRemove?: () => void,
 * }} props
 */
export function Chart({ title, lines, axis, smoothing = 0, sync, height = 190, onPick, note, onRemove }) {
  const box = useRef(/** @type {HTMLDivElement | null} */ (null));
  const plot = useRef(/** @type {any} */ (null));
  const pick = useRef(onPick);
  pick.current = onPick;
  const [big, setBig] = useState(false);
  const [asked, setAsked] = useState(false);
  const shape = JSON.stringify([lines.map((line) => [line.label, line.colour, !!line.low, !!line.fill]), isZero(lines), axis, smoothing > 0, big, height]);
  const shown = useRef(lines);
  shown.current = lines;

  useEffect(() => {
    const element = box.current;
    if (!element || !lines.length) return undefined;
    const make = () => {
      plot.current?.destroy();
      plot.current = made(element, prepared(shown.current, smoothing), { axis, sync, height: big ? 420 : height });
      element.querySelector("canvas")?.setAttribute("aria-hidden", "true");
    };
    make();
    const sizes = new ResizeObserver(() => plot.current?.setSize({ width: element.clientWidth, height: big ? 420 : height }));
    sizes.observe(element);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", make);
    const detach = picking(element, () => plot.current, () => shown.current, (step) => pick.current?.(step));
    return () => {
      sizes.disconnect();
      scheme.removeEventListener("change", make);
      detach();
      plot.current?.destroy();
      plot.current = null;
    };
  }, [shape]);

  useEffect(() => {
    if (!plot.current || !lines.length) return;
    const { min, max } = plot.current.scales.x;
    const data = plot.current.data[0];
    const isZoomed = typeof min === "number" && data.length && (min > data[0] || max < data[data.length - 1]);
    plot.current.setData(prepared(lines, smoothing).data, !isZoomed);
    if (isZoomed) plot.current.redraw();
    showLast(plot.current);
  }, [lines, smoothing]);

  const metrics = [...new Set(lines.map((line) => line.metric ?? line.label))];
  return html`<section class=${`chart ${big ? "big" : ""} ${onPick ? "picks" : ""}`} aria-label=${`chart: ${title}`}>
    <header>
      <h2>${title}</h2>
      <span class="tools">
        <button class="tool" title="what it means" aria-expanded=${asked} onClick=${() => setAsked(!asked)}>?</button>
        <button class="tool" title=${big ? "smaller" : "larger"} aria-label=${`${big ? "smaller" : "larger"}: ${title}`} onClick=${() => setBig(!big)}>${big ? "⤡" : "⤢"}</button>
        <button class="tool" title="save as PNG" onClick=${() => savePng(plot.current, title, lines)}>PNG</button>
        <button class="tool" title="save as CSV" onClick=${() => download(`${title}.csv`, new Blob([csv(lines, axis)], { type: "text/csv" }))}>CSV</button>
        ${onRemove && html`<button class="tool" title="remove this chart" aria-label=${`remove ${title}`} onClick=${onRemove}>×</button>`}
      </span>
    </header>
    ${asked && html`<dl class="meaning">${metrics.map((name) => html`<dt>${name}</dt><dd>${meaningOf(name)}</dd>`)}</dl>`}
    ${lines.length && !isZero(lines)
      ? html`<div class="plot" ref=${box} role="img" aria-label=${summary(title, lines, axis)}></div>`
      : html`<p class="none">${lines.length ? "0 at every step" : (note ?? "no values yet")}</p>`}
  </section>`;
}

/**
 * Returns the chart in a sentence, for those who cannot see it.
 * @param {string} title
 * @param {Line[]} lines
 * @param {Axis} axis
 */
function summary(title, lines, axis) {
  const told = lines.map((line) => {
    const values = line.own ?? line.y;
    const last = values.length - 1;
    return `${line.label} from ${number(values[0])} to ${number(values[last])} at ${axis} ${shownX(axis, line.x[last])}`;
  });
  return `${title}: ${told.join("; ")}`;
}

/**
 * @param {HTMLElement} element
 * @param {{data: any, series: any[], bands: any[]}} found
 * @param {{axis: Axis, sync?: string, height: number}} look
 */
function made(element, found, { axis, sync, height }) {
  const ink = colour("--muted");
  const grid = { stroke: colour("--grid"), width: 1 };
  const font = "11px system-ui, sans-serif";
  const common = { stroke: ink, grid, ticks: { show: false }, font };
  const chart = new uPlot(
    {
      width: element.clientWidth || 320,
      height,
      series: [
        { label: axis === "time" ? "time" : axis, value: (/** @type {any} */ _, /** @type {number} */ value) => (value === null ? "–" : shownX(axis, value)) },
        ...found.series.map((one) => ({ ...one, value: (/** @type {any} */ chart, /** @type {number | null} */ value, /** @type {number} */ line, /** @type {number | null} */ index) =>
          latest(chart, value, line, index, one.below) })),
      ],
      bands: found.bands,
      scales: { x: { time: false }, y: { range: rangeOf } },
      axes: [
        { ...common, size: 26, values: (/** @type {any} */ _, /** @type {number[]} */ values) => values.map((value) => shownX(axis, value)) },
        { ...common, size: 52, values: (/** @type {any} */ _, /** @type {number[]} */ values) => values.map((value) => number(value)) },
      ],
      cursor: { drag: { x: true, y: false }, points: { size: 6 }, ...(sync ? { sync: { key: sync } } : {}) },
      legend: { live: true },
      hooks: { setCursor: [showLast] },
    },
    found.data,
    element,
  );
  return chart;
}

/**
 * Shows the last values in the legend while nothing is pointed at.
 * @param {any} chart
 */
function showLast(chart) {
  if (chart.cursor.idx === null || chart.cursor.idx === undefined) chart.setLegend({ idx: chart.data[0].length - 1 });
}

/**
 * Returns the value of a line in the legend; where it has none, the one before. Of a stacked line
 * it is its own value, without the line `below`.
 * @param {any} chart
 * @param {number | null} value
 * @param {number} line
 * @param {number | null} index
 * @param {number} [below]
 */
function latest(chart, value, line, index, below) {
  /** @param {number} at */
  const lastOf = (at) => chart.data[at].slice(0, (index ?? -1) + 1).findLast((/** @type {number | null} */ one) => one !== null && one !== undefined);
  const found = lastOf(line) ?? value;
  return number(found === null || found === undefined ? found : found - (below ? (lastOf(below) ?? 0) : 0), 4);
}

/**
 * Returns the range of the y axis: a tenth of room around the values, and 0 to 1 around nothing but
 * zeros.
 * @param {any} _
 * @param {number | null} min
 * @param {number | null} max
 * @returns {[number, number]}
 */
function rangeOf(_, min, max) {
  if (min === null || max === null) return [0, 1];
  if (min === max) return min === 0 ? [0, 1] : [min - Math.abs(min) / 10, max + Math.abs(max) / 10];
  const room = (max - min) / 10;
  return [min >= 0 && min - room < 0 ? 0 : min - room, max + room];
}

/**
 * Calls `picked` with the step of a clicked point. A drag is a zoom, and picks nothing.
 * @param {HTMLElement} element
 * @param {() => any} plot
 * @param {() => Line[]} lines
 * @param {(step: number) => void} picked
 */
function picking(element, plot, lines, picked) {
  let from = 0;
  /** @param {MouseEvent} event */
  const down = (event) => (from = event.clientX);
  /** @param {MouseEvent} event */
  const click = (event) => {
    const chart = plot();
    const isOver = event.target instanceof Element && event.target.closest(".u-over");
    if (!chart || !isOver || Math.abs(event.clientX - from) > 3 || event.detail > 1) return;
    const index = chart.cursor.idx;
    if (index === null || index === undefined) return;
    const x = chart.data[0][index];
    for (const line of lines()) {
      const at = line.x.indexOf(x);
      if (at >= 0) return void picked(line.steps[at]);
    }
  };
  element.addEventListener("mousedown", down);
  element.addEventListener("click", click);
  return () => {
    element.removeEventListener("mousedown", down);
    element.removeEventListener("click", click);
  };
}

/**
 * Saves the chart with its title and its legend.
 * @param {any} chart
 * @param {string} title
 * @param {Line[]} lines
 */
function savePng(chart, title, lines) {
  if (!chart) return;
  const source = /** @type {HTMLCanvasElement} */ (chart.ctx.canvas);
  const scale = devicePixelRatio || 1;
  const head = 44 * scale;
  const canvas = document.createElement("canvas");
  canvas.width = source.width;
  canvas.height = source.height + head;
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.fillStyle = colour("--card");
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = colour("--ink");
  context.font = `600 ${13 * scale}px system-ui, sans-serif`;
  context.fillText(title, 10 * scale, 18 * scale);
  context.font = `${11 * scale}px system-ui, sans-serif`;
  let x = 10 * scale;
  for (const line of lines) {
    context.fillStyle = lineColour(line.colour);
    context.fillRect(x, 28 * scale, 10 * scale, 10 * scale);
    context.fillStyle = colour("--muted");
    context.fillText(line.label, x + 14 * scale, 37 * scale);
    x += context.measureText(line.label).width + 30 * scale;
  }
  context.drawImage(source, 0, head);
  canvas.toBlob((blob) => blob && download(`${title}.png`, blob));
}

/**
 * A small line without axes, for lists.
 * @param {{values: (number | null)[], label: string}} props
 */
export function Sparkline({ values, label }) {
  const shown = /** @type {number[]} */ (values.filter((value) => value !== null && value !== undefined));
  if (shown.length < 2) return html`<span class="spark none" role="img" aria-label=${`${label}: no values`}></span>`;
  const [low, high] = [Math.min(...shown), Math.max(...shown)];
  const path = shown.map((value, index) => {
    const x = 1 + (index / (shown.length - 1)) * 78;
    const y = 18 - ((value - low) / (high - low || 1)) * 16;
    return `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
  });
  const told = `${label}: ${number(shown[0])} to ${number(shown[shown.length - 1])}`;
  return html`<svg class="spark" viewBox="0 0 80 20" role="img" aria-label=${told}><path d=${path.join("")} /></svg>`;
}
