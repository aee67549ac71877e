"use strict";
// What all parts of the page share: the data, how to make elements, how to write numbers.
// Texts come from run directories and may hold anything, so they are only ever set as text.

const page = {
  data: JSON.parse(document.getElementById("data").textContent),
  sections: [],
  printing: false,
};
page.runsOf = new Map(page.data.groups.map((_, index) => [index, page.data.runs.filter((run) => run.group === index)]));
page.several = {
  families: new Set(page.data.conditions.map((condition) => condition.family)).size > 1,
  seeds: page.data.groups.some((group) => group.seeds.length > 1),
};
const PRINT_WIDTH = 690;
// The colours of the palette that one of the backgrounds would swallow.
const REPLACED = {
  light: { "#F0E442": "#8c8300" },
  dark: { "#000000": "#f2f2f2", "#0072B2": "#3fa0e0" },
};

function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function makeSvg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

function isDark() {
  return document.documentElement.dataset.theme === "dark";
}

// Asked for thousands of times while drawing, changed only with the theme.
const themed = {};
function variable(name) {
  if (themed.theme !== document.documentElement.dataset.theme) {
    for (const key of Object.keys(themed)) delete themed[key];
    themed.theme = document.documentElement.dataset.theme;
  }
  themed[name] ??= getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return themed[name];
}

function colorOf(method) {
  const { color } = page.data.methods[method];
  return REPLACED[isDark() ? "dark" : "light"][color] || color;
}

function dashOf(method, width = 2) {
  return page.data.dashes[page.data.methods[method].dash].map((length) => width * length).join(" ") || null;
}

function swatch(method) {
  const line = makeSvg("line", { x1: 1, y1: 6, x2: 25, y2: 6, "stroke-width": 3, stroke: colorOf(method), "stroke-dasharray": dashOf(method, 2.5) });
  return makeSvg("svg", { class: "swatch", viewBox: "0 0 26 12", "aria-hidden": "true" }, line);
}

function methodTitle(group) {
  return page.data.methods[group.method].title;
}

function metricNamed(name) {
  return page.data.metrics.find((metric) => metric.name === name) || { name, label: name, percent: false, lower: false };
}

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

// Of what the values are a sample of; null for fewer than two.
function sampleDeviation(values) {
  if (values.length < 2) return null;
  const middle = mean(values);
  return Math.sqrt(values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (values.length - 1));
}

function formatNumber(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(size >= 1000 ? 6 : 4)));
}

function formatPercent(value, digits = 1) {
  return Number.isFinite(value) ? `${(100 * value).toFixed(digits)} %` : "–";
}

// For the marks of an axis, which are round numbers.
function markAs(metric) {
  return metric.percent ? (value) => `${formatNumber(100 * value)} %` : formatNumber;
}

function formatAs(metric) {
  return metric.percent ? (value) => formatPercent(value) : formatNumber;
}

// A number of a metric's unit without the unit, of as many digits as tables have.
function plain(metric, value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (metric.percent) return (100 * value).toFixed(1);
  if (metric.whole) return value.toFixed(1);
  const size = Math.abs(value);
  return (size !== 0 && size < 0.001) || size >= 1e5 ? formatNumber(value) : value.toFixed(size >= 100 ? 1 : 3);
}

function signed(metric, value) {
  const text = plain(metric, value);
  return Number(text) === 0 ? text.replace("-", "") : (value > 0 ? "+" : "") + text.replace("-", "−");
}

function withDeviation(metric, found) {
  if (!found) return "–";
  return plain(metric, found.mean) + (found.deviation === null ? "" : ` ± ${plain(metric, found.deviation)}`);
}

function megabytes(value) {
  return value >= 1 ? value.toFixed(1) : formatNumber(value);
}

function formatSeconds(seconds) {
  if (seconds < 90) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 5400) return `${(seconds / 60).toFixed(1)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

function runTitle(run) {
  const group = page.data.groups[run.group];
  return group.seeds.length > 1 ? `${group.title}, seed ${run.seed}` : group.title;
}

// The choices of a list, changed only when they are others: the reader may be at it.
function syncOptions(select, options, chosen) {
  const wanted = JSON.stringify(options);
  if (select.dataset.options !== wanted) {
    select.replaceChildren(...options.map(([value, label]) => make("option", { value }, label)));
    select.dataset.options = wanted;
  }
  if (chosen !== null) select.value = chosen;
}

// A choice that is part of the state: shown, changed by the reader, drawn again.
function chooser(id, label, name, options) {
  const select = make("select", { id, onchange: (event) => change({ [name]: event.target.value }) });
  if (options) syncOptions(select, options, page.state[name]);
  return make("label", {}, `${label} `, select);
}

function switcher(id, label, name) {
  return make("label", {}, make("input", { id, type: "checkbox", checked: page.state[name], onchange: (event) => change({ [name]: event.target.checked }) }), label);
}

function widthOf(host) {
  if (page.printing) return host.closest(".panels:not(.single)") ? PRINT_WIDTH / 2 - 15 : PRINT_WIDTH;
  return Math.max(200, host.clientWidth);
}

// rows: cells of text or elements; the first cell of a row is its heading.
function tableOf(heads, rows, attributes = {}) {
  return make("table", attributes,
    make("thead", {}, make("tr", {}, heads.map((head) => (head instanceof Element ? head : make("th", { scope: "col" }, head))))),
    make("tbody", {}, rows.map(([first, ...rest]) => make("tr", {}, make("th", { scope: "row" }, first), rest.map((cell) => (cell instanceof HTMLTableCellElement ? cell : make("td", {}, cell)))))));
}

function scrolling(id, label, ...children) {
  return make("div", { class: "scroll", id, tabindex: 0, role: "region", "aria-label": label }, ...children);
}
