"use strict";
// Curves by uPlot, bars and timelines by hand. Texts are set as text, never as HTML.

const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (number) => ink(`--c${number % 8}`);
let charts = [];

/** Make an element: attributes and listeners, then children (texts or elements). */
function make(tag, about = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(about)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) made.append(child);
  return made;
}

function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (value !== 0 && (Math.abs(value) >= 1e7 || Math.abs(value) < 1e-3)) return value.toExponential(2);
  if (Number.isInteger(value) || Math.abs(value) >= 1e4) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

const known = (values) => values.filter((value) => value !== null && value !== undefined);

function summaryOf(lines) {
  return lines.map(({ label, values }) => {
    const found = known(values);
    const least = found.reduce((a, b) => Math.min(a, b));
    const most = found.reduce((a, b) => Math.max(a, b));
    return `${label}: ${short(found[0])} to ${short(found[found.length - 1])}, between ${short(least)} and ${short(most)}`;
  }).join("; ");
}

/** Draw lines over the numbers xs; a line is {label, values}, values may hold null. */
function chart(title, xs, lines, { unit = "", x = "step" } = {}) {
  const shown = lines.filter(({ values }) => values && known(values).length);
  const last = shown.length ? known(shown[0].values).pop() : null;
  const place = make("div", { role: "img", "aria-label": `${title}. ${summaryOf(shown)}` });
  const figure = make("figure", {},
    make("figcaption", {}, title, make("span", { class: "soft" }, ` ${short(last)}${unit ? ` ${unit}` : ""}`)), place);
  if (!shown.length) { place.append(make("p", { class: "soft" }, "nothing yet")); return figure; }
  const draw = () => {
    place.replaceChildren();
    const axis = { stroke: ink("--soft"), grid: { stroke: ink("--line"), width: 1 }, ticks: { stroke: ink("--line") } };
    const options = {
      width: Math.max(place.clientWidth, 200), height: 180, scales: { x: { time: false } }, legend: { show: shown.length > 1 },
      axes: [{ ...axis }, { ...axis, size: 58, values: (_chart, ticks) => ticks.map(short) }],
      series: [{ label: x }, ...shown.map(({ label }, number) => ({
        label, stroke: colour(number), width: 1.5, spanGaps: true, points: { show: xs.length < 40 },
        dash: number > 7 ? [6, 4] : undefined, value: (_chart, value) => short(value),
      }))],
    };
    new uPlot(options, [xs, ...shown.map(({ values }) => values.map((value) => value ?? null))], place);
  };
  charts.push({ place, draw });
  return figure;
}

/** Draw the charts that are on the page now; again when its width or its colours change. */
function drawCharts() {
  charts = charts.filter(({ place }) => place.isConnected);
  for (const { draw } of charts) draw();
}
let resizing = 0;
window.addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(drawCharts, 150); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);

const named = new Map();
/** The same colour for the same name, wherever it is drawn. */
function colourOf(name) {
  if (!named.has(name)) named.set(name, named.size);
  return `var(--c${named.get(name) % 8})`;
}
const keyOf = (name) => {
  const box = make("i");
  box.style.background = colourOf(name);
  return make("span", { class: "key" }, box, name);
};

/** A bar of shares (percent by name). */
function bar(shares) {
  const parts = Object.entries(shares).filter(([, share]) => share >= 0.05).sort((a, b) => b[1] - a[1]);
  const said = parts.map(([name, share]) => `${name} ${share.toFixed(1)} %`).join(", ");
  return make("div", { class: "bar", role: "img", "aria-label": said || "nothing", title: said }, parts.map(([name, share]) => {
    const part = make("span");
    part.style.width = `${share}%`;
    part.style.background = colourOf(name);
    return part;
  }));
}

/** The rows of one stage, stacked in each bin; waits are drawn pale. */
function stage(rows, bins) {
  const said = rows.map(({ kind, name, seconds }) => `${kind === "wait" ? "waits for " : ""}${name} ${short(seconds)} s`);
  const canvas = make("canvas", { class: "stage", role: "img", "aria-label": said.join(", "), title: said.join("\n") });
  const draw = () => {
    const scale = window.devicePixelRatio || 1;
    canvas.width = canvas.clientWidth * scale;
    canvas.height = canvas.clientHeight * scale;
    const context = canvas.getContext("2d");
    const wide = canvas.width / bins;
    const total = new Array(bins).fill(0);
    for (const { shares } of rows) shares.forEach((share, bin) => { total[bin] += share; });
    const from = new Array(bins).fill(canvas.height);
    for (const { kind, name, shares } of rows) {
      context.fillStyle = ink(colourOf(name).slice(4, -1));
      context.globalAlpha = kind === "wait" ? 0.35 : 1;
      shares.forEach((share, bin) => {
        const high = share / Math.max(total[bin], 1) * canvas.height;
        from[bin] -= high;
        if (high > 0.2) context.fillRect(Math.floor(bin * wide), from[bin], Math.ceil(wide), high);
      });
    }
  };
  charts.push({ place: canvas, draw });
  return canvas;
}
