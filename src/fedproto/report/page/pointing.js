// Reading a chart: values under the pointer, and by arrow keys aloud.

function showChart(host, spec, width, height) {
  const svg = chart(spec, width, height);
  host.classList.add("chart");
  if (!host.tip) {
    host.tip = make("div", { class: "tip", hidden: true });
    host.said = make("p", { class: "quiet", role: "status" });
  }
  host.replaceChildren(svg, host.tip, host.said);
  host.tip.hidden = true;
  host.setAttribute("tabindex", 0);
  host.setAttribute("role", "group");
  host.setAttribute("aria-label", `${spec.label}. Arrow keys read the values.`);
  host.onkeydown = (event) => byKey(event, host, svg, spec);
  host.onblur = () => { host.tip.hidden = true; };
  host.onpointermove = (event) => byPointer(event, host, svg, spec);
  host.onpointerleave = () => { hideReading(host, svg); };
}

function at(event, svg) {
  const bounds = svg.getBoundingClientRect();
  const factor = svg.viewBox.baseVal.width / bounds.width;
  return [(event.clientX - bounds.left) * factor, (event.clientY - bounds.top) * factor];
}

function nearest(sorted, value) {
  let [low, high] = [0, sorted.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle; else high = middle;
  }
  return Math.abs(sorted[low] - value) <= Math.abs(sorted[high] - value) ? low : high;
}

function placesOf(spec) {
  spec.places ??= [...new Set([...(spec.lines || []).filter((line) => !line.silent).flatMap((line) => line.x), ...(spec.points || []).map((point) => point.x)])].sort((one, other) => one - other);
  return spec.places;
}

// What is at a position of the x axis: the nearest value of every line, the points there.
function readingsAt(spec, position, width) {
  const readings = (spec.points || []).filter((point) => point.x === position).map((point) => ({ ...point, said: point.text }));
  for (const line of spec.lines || []) {
    if (line.silent || !line.x.length) continue;
    const index = nearest(line.x, position);
    if (line.y[index] === null || Math.abs(line.x[index] - position) > width) continue;
    readings.push({ ...line, value: line.y[index], said: line.say ? line.say(index) : spec.y.say(line.y[index]) });
  }
  return readings.sort((one, other) => (other.value ?? 0) - (one.value ?? 0));
}

function byPointer(event, host, svg, spec) {
  const [px, py] = at(event, svg);
  const { x } = svg.scales;
  const places = placesOf(spec);
  if (!places.length || px < svg.area.left - 8 || px > svg.area.right + 8) return hideReading(host, svg);
  host.reading = nearest(places, x.invert(px));
  showReading(host, svg, spec, places[host.reading], py);
}

function showReading(host, svg, spec, position, py) {
  const { x } = svg.scales;
  const readings = readingsAt(spec, position, (x.range[1] - x.range[0]) / 20);
  hideReading(host, svg);
  if (!readings.length || x(position) < svg.area.left - 1 || x(position) > svg.area.right + 1) return readings;
  svg.append(lineAt(x(position), svg.area.top, x(position), svg.area.bottom, { class: "cursor", stroke: variable("--faint") }));
  const rows = readings.slice(0, 12).map((one) => make("div", {}, one.method === undefined ? null : swatch(one.method), one.label, make("b", {}, one.said)));
  if (readings.length > 12) rows.push(make("div", {}, `and ${readings.length - 12} more`));
  host.tip.replaceChildren(make("strong", {}, `${spec.x.name} ${(spec.x.say || formatNumber)(position)}`), ...rows);
  host.tip.hidden = false;
  const left = x(position) * host.clientWidth / svg.viewBox.baseVal.width;
  const right = left + 16 + host.tip.offsetWidth < host.clientWidth;
  host.tip.style.left = `${Math.max(0, right ? left + 16 : left - 16 - host.tip.offsetWidth)}px`;
  host.tip.style.top = `${Math.max(0, Math.min(py, host.clientHeight - host.tip.offsetHeight))}px`;
  return readings;
}

function hideReading(host, svg) {
  svg.querySelector(".cursor")?.remove();
  host.tip.hidden = true;
}

function byKey(event, host, svg, spec) {
  const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
  const places = placesOf(spec);
  if (event.key in steps && places.length) {
    event.preventDefault();
    host.reading = Math.min(places.length - 1, Math.max(0, (host.reading ?? -1) + steps[event.key]));
    const readings = showReading(host, svg, spec, places[host.reading], svg.area.top) || [];
    host.said.textContent = `${spec.x.name} ${(spec.x.say || formatNumber)(places[host.reading])}: ${readings.map((one) => `${one.label} ${one.said}`).join("; ") || "nothing"}`;
  }
}
