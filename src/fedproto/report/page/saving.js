// Tables as CSV, charts as SVG or PNG: buttons in every section, files made here.

const CELL = 460;

function saveButtons(section) {
  const button = (text, label, onclick) => make("button", { type: "button", class: "save", "aria-label": label, onclick }, text);
  return make("div", { class: "saves" },
    section.rows ? button("CSV", `${section.title}: save the table as CSV`, () => download(`${section.id}.csv`, "text/csv", csvOf(section.rows()))) : null,
    section.drawings ? [
      button("SVG", `${section.title}: save the charts as SVG`, () => download(`${section.id}.svg`, "image/svg+xml", svgText(section))),
      button("PNG", `${section.title}: save the charts as PNG`, () => savePng(section)),
    ] : null);
}

function download(name, type, content) {
  const address = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  const link = make("a", { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

function csvOf(rows) {
  const cell = (value) => {
    let text = value === null || value === undefined ? "" : String(value);
    // What a spreadsheet would take for a formula begins with a quote.
    if (typeof value === "string" && /^\s*[=+\-@＝＋－＠]/.test(text) && isNaN(Number(text))) text = `'${text}`;
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => row.map(cell).join(",")).join("\n") + "\n";
}

// All charts of a section on one sheet, with a title and the methods' lines.
function sheet(section) {
  const drawings = section.drawings();
  const columns = Math.min(3, drawings.length) || 1;
  const cell = columns === 1 ? 760 : CELL;
  const width = columns * cell + 20;
  const legend = section.legend === false ? [] : legendRows(width);
  let y = 56 + 20 * legend.length;
  const sheetSvg = svgOf(width, y, section.title);
  const rest = [];
  for (let index = 0; index < drawings.length; index += columns) {
    const row = drawings.slice(index, index + columns).map((drawing) => ({ title: drawing.title, svg: drawing.draw(cell - 20) }));
    row.forEach(({ title, svg }, column) => {
      svg.setAttribute("x", 10 + column * cell);
      svg.setAttribute("y", y + 22);
      rest.push(textAt(16 + column * cell, y + 12, shortened(title, 60), { fill: variable("--ink"), "font-weight": 600 }), svg);
    });
    y += 34 + Math.max(...row.map(({ svg }) => svg.viewBox.baseVal.height));
  }
  sheetSvg.setAttribute("viewBox", `0 0 ${width} ${y}`);
  sheetSvg.setAttribute("height", y);
  sheetSvg.append(makeSvg("rect", { width, height: y, fill: variable("--paper") }),
    textAt(16, 28, `${page.data.title}: ${section.title}`, { fill: variable("--ink"), "font-size": 17, "font-weight": 600 }), ...legend.flat(), ...rest);
  return sheetSvg;
}

function legendRows(width) {
  const rows = [[]];
  let x = 16;
  for (const method of page.methods) {
    const { title } = page.data.methods[method];
    const room = 50 + 7 * title.length;
    if (x + room > width && x > 16) { rows.push([]); x = 16; }
    const y = 48 + 20 * (rows.length - 1);
    rows[rows.length - 1].push(lineAt(x, y - 4, x + 28, y - 4, { stroke: colorOf(method), "stroke-width": 2.5, "stroke-dasharray": dashOf(method, 2.5) }), textAt(x + 34, y, title, { fill: variable("--ink") }));
    x += room;
  }
  return rows;
}

function svgText(section) {
  return new XMLSerializer().serializeToString(sheet(section));
}

async function savePng(section) {
  const text = svgText(section);
  const picture = new Image();
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await picture.decode();
  const canvas = make("canvas", { width: 2 * picture.width, height: 2 * picture.height });
  const context = canvas.getContext("2d");
  context.scale(2, 2);
  context.drawImage(picture, 0, 0);
  canvas.toBlob((blob) => download(`${section.id}.png`, "image/png", blob));
}
