"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const names = Object.keys(data.scripts);
const find = (id) => document.getElementById(id);
const table = document.querySelector("#page table");
const phone = matchMedia("(max-width: 700px)");
let state = {}; // what the address says: left, right, mark, all
let rows = []; // of the pair: {a, b: numbers of lines or null, equal, words, shown, element}
let folds = []; // the bodies of the table that can be hidden
let differences = []; // of each, the elements of its rows
let here = -1; // the difference that n and p have reached

function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// The address is #LEFT..RIGHT@MARK+all. All but the pair may be missing.

function readAddress() {
  const form = /^#(\w+)\.\.(\w+)(?:@([1-9])[.\d]*)?(\+all)?/;
  const [, left, right, mark, all] = form.exec(location.hash) || [];
  if (!names.includes(left) || !names.includes(right) || left === right) {
    return { left: data.steps[0][0], right: data.steps[0][1] };
  }
  return { left, right, mark, all: Boolean(all) };
}

function writeAddress(changes) {
  const { left, right, mark, all } = { ...state, ...changes };
  return `#${left}..${right}${mark ? `@${mark}` : ""}${all ? "+all" : ""}`;
}

// A link that changes a part of the address; see updateLinks.
const makeLink = (text, changes) => make("a", { changes, className: "change" }, text);

function updateLinks() {
  find("swap").changes = { left: state.right, right: state.left };
  for (const link of document.querySelectorAll("a.change")) link.href = writeAddress(link.changes);
}

// The rows of the table.

function readPair() {
  const turned = names.indexOf(state.left) > names.indexOf(state.right);
  const sides = turned ? [state.right, state.left] : [state.left, state.right];
  return { turned, ...data.pairs[sides.join("..")] };
}

function readRows(pair) {
  const found = [];
  let [a, b] = [0, 0];
  for (const run of pair.rows) {
    const words = Array.isArray(run) ? run : null;
    const kind = words ? "~" : run[0];
    for (let left = words ? 1 : +run.slice(1); left > 0; left--) {
      const row = { a: kind === "+" ? null : a++, b: kind === "-" ? null : b++, words };
      found.push({ ...row, equal: kind === "=", unlike: !words && kind !== "=" });
    }
  }
  for (const row of pair.turned ? found : []) {
    [row.a, row.b, row.words] = [row.b, row.a, row.words && [...row.words].reverse()];
  }
  return phone.matches ? separateUnlike(found) : found;
}

// In a single column, unlike lines stand one side after the other.
function separateUnlike(found) {
  const separate = [];
  for (let begin = 0, end = 0; begin < found.length; begin = end) {
    while (found[end]?.unlike) end++;
    const unlike = found.slice(begin, end);
    const [gone, come] = ["a", "b"].map((side) => unlike.filter((row) => row[side] !== null));
    separate.push(...gone.map((row) => ({ ...row, b: null })));
    separate.push(...come.map((row) => ({ ...row, a: null })));
    if (begin === end) separate.push(found[end++]);
  }
  return separate;
}

// A line in its colours, with the ranges of letters that changed in elements of their own.
function paint(script, number, ranges, tag) {
  const text = script.lines[number];
  const runs = [...script.colours[number].matchAll(/([a-z])(\d+)/g)];
  const colours = runs.map(([, colour, count]) => colour.repeat(count)).join("");
  const changed = new Array(text.length).fill(false);
  for (let n = 0; n < ranges.length; n += 2) changed.fill(true, ranges[n], ranges[n + 1]);
  const code = make("code");
  code.style.setProperty("--deep", text.search(/\S|$/));
  for (let begin = 0, end = 0; begin < text.length; begin = end) {
    const [className, isChanged] = [colours[begin], changed[begin]];
    while (colours[end] === className && changed[end] === isChanged) end++;
    code.append(make(isChanged ? tag : "span", { className }, text.slice(begin, end)));
  }
  return code;
}

// Whether the two lines of a row differ in their indentation alone.
function isIndented(row) {
  const [left, right] = [data.scripts[state.left], data.scripts[state.right]];
  return row.words && left.lines[row.a].trim() === right.lines[row.b].trim();
}

function makeCell(row, side) {
  const number = row[side];
  const left = side === "a";
  const tag = left ? "del" : "ins";
  if (number === null) return make("td", { className: `${side} gap` });
  const cell = make("td", { className: row.equal ? side : `${side} ${tag}` });
  if (isIndented(row)) cell.classList.add("indented");
  cell.dataset.n = number + 1;
  const spoken = make("span", { className: "unseen" }, left ? "removed: " : "added: ");
  if (!row.equal) cell.append(spoken);
  else if (left) cell.ariaHidden = "true"; // A listener hears an equal line once.
  const script = data.scripts[left ? state.left : state.right];
  cell.append(paint(script, number, row.words?.[left ? 0 : 1] || [], tag));
  return cell;
}

function nameParts(first, last) {
  const { parts } = data.scripts[state.right];
  const inside = parts.filter(([, begin, end]) => begin <= last && end > first);
  return inside.map(([name]) => name).join(", ");
}

function makeFold(hidden) {
  const lines = make("tbody", {}, ...hidden.map((row) => row.element));
  const numbers = hidden.map((row) => row.b).filter((number) => number !== null);
  const kind = hidden.every((row) => row.equal) ? "equal lines" : "lines";
  const inside = numbers.length ? `: ${nameParts(numbers[0], numbers.at(-1))}` : "";
  const button = make("button");
  lines.open = (wanted) => {
    lines.hidden = !wanted;
    button.ariaExpanded = String(wanted);
    button.textContent = `${wanted ? "▾" : "▸"} ${hidden.length} ${kind}${inside}`;
  };
  button.onclick = () => lines.open(lines.hidden);
  folds.push(lines);
  lines.open(state.all);
  const cell = make("td", { colSpan: 2 }, button);
  return [make("tbody", {}, make("tr", { className: "fold" }, cell)), lines];
}

// What is shown: of an open mark its lines alone; otherwise the differences below the imports,
// and the lines around them.
function chooseShown(pair) {
  const marked = { a: linesOfMark(state.left, pair), b: linesOfMark(state.right, pair) };
  const ends = [state.left, state.right].map((name) => data.scripts[name].parts[1][2]);
  for (const row of rows) {
    row.marked = marked.a.includes(row.a) || marked.b.includes(row.b);
    row.head = (row.a ?? 0) < ends[0] && (row.b ?? 0) < ends[1];
    row.shown = state.mark ? row.marked : !row.equal && !row.head;
  }
  const around = state.mark ? 0 : data.context;
  const isNear = (_, n) => rows.slice(Math.max(0, n - around), n + around + 1).some((row) => row.shown);
  return rows.map(isNear);
}

function fillTable(pair) {
  for (const row of rows) row.element = make("tr", {}, makeCell(row, "a"), makeCell(row, "b"));
  for (const body of [...table.tBodies]) body.remove();
  [folds, differences, here] = [[], [], -1];
  const visible = chooseShown(pair);
  for (const [n, row] of rows.entries()) {
    if (row.marked) row.element.cells[row.b === null ? 0 : 1].classList.add("place");
    if (!row.shown) continue;
    if (!rows[n - 1]?.shown) differences.push([]);
    differences.at(-1).push(row.element);
  }
  for (let begin = 0, end = 0; begin < rows.length; begin = end) {
    while (end < rows.length && visible[end] === visible[begin]) end++;
    const part = rows.slice(begin, end);
    if (visible[begin] || part.length <= 3) {
      table.append(make("tbody", {}, ...part.map((row) => row.element)));
    } else {
      table.append(...makeFold(part));
    }
  }
}

// The marks.

const placesOf = (name, mark) => data.scripts[name].marks.filter(([number]) => number === mark);

// The lines of the open mark in a script, or those that they replace in a script without marks.
function linesOfMark(name, pair) {
  const places = placesOf(name, state.mark);
  if (places.length) {
    return places.flatMap(([, first, end]) => Array.from({ length: end - first }, (_, n) => first + n));
  }
  const { marks } = data.scripts[name === state.left ? state.right : state.left];
  return marks.flatMap(([number], n) => (number === state.mark ? (pair.replaced?.[n] ?? []) : []));
}

function openMark() {
  const [title, sentences] = data.recipe[state.mark];
  const text = make("p", {}, make("b", {}, `${state.mark} ${title}. `));
  text.insertAdjacentHTML("beforeend", `${sentences} `);
  text.append(makeLink("Show all differences", { mark: null }));
  const note = make("tr", { className: "note" }, make("td", { colSpan: 2 }, text));
  rows.find((row) => row.shown).element.before(note);
  reveal(note);
}

// A click on the chip of the open mark closes it.
function updateChips() {
  const any = [state.left, state.right].some((name) => data.scripts[name].marks.length);
  find("marks").hidden = !any;
  find("unmarked").hidden = any;
  for (const chip of find("marks").children) {
    const current = chip.mark === state.mark;
    chip.changes = { mark: current ? null : chip.mark };
    chip.ariaCurrent = current ? "true" : null;
  }
}

// Moving about.

function reveal(element) {
  element.tabIndex = -1;
  element.focus({ preventScroll: true });
  const above = find("bar").offsetHeight + 60; // Three lines stay in sight above the element.
  scrollTo({ top: scrollY + element.getBoundingClientRect().top - above });
}

function showDifference(number) {
  for (const element of table.querySelectorAll(".now")) element.classList.remove("now");
  here = Math.max(0, Math.min(number, differences.length - 1));
  find("where").textContent = `difference ${here + 1} of ${differences.length}`;
  for (const element of differences[here]) element.classList.add("now");
  reveal(differences[here][0]);
}

// Steps from the difference reached last, or from where the reader has scrolled to.
function stepDifference(step) {
  const top = find("bar").offsetHeight;
  const places = differences.map((elements) => elements[0].getBoundingClientRect().top);
  const seen = (element) => {
    const place = element.getBoundingClientRect();
    return place.bottom > top && place.top < innerHeight;
  };
  if (here >= 0 && differences[here].some(seen)) return showDifference(here + step);
  const above = places.filter((place) => place <= top).length;
  showDifference(step > 0 ? above : above - 1);
}

// The page as a whole.

function describePair(pair) {
  const isStep = ([left, right]) => left === state.left && right === state.right;
  const sentence = data.steps.find(isStep)?.[2] || "";
  const changed = rows.filter((row) => !row.equal);
  const [gone, come] = ["a", "b"].map((side) => changed.filter((row) => row[side] !== null).length);
  const lines = `${gone} lines go and ${come} come, with comments and docstrings.`;
  find("about").innerHTML = `${sentence} <small>${pair.statements} statements change. ${lines}</small>`;
  for (const door of document.querySelectorAll("nav a")) {
    const current = door.hash === `#${state.left}..${state.right}`;
    door.ariaCurrent = current ? "page" : null;
  }
}

function render() {
  const { left, right } = state;
  state = readAddress();
  const hasMark = [state.left, state.right].some((name) => placesOf(name, state.mark).length);
  if (!hasMark) state.mark = null;
  if (location.hash) history.replaceState(null, "", writeAddress()); // What it says is what is shown.
  const pair = readPair();
  rows = readRows(pair);
  fillTable(pair);
  for (const [index, side] of ["left", "right"].entries()) {
    find(side).value = state[side];
    table.tHead.rows[0].cells[index].textContent = `${state[side]}.py`;
  }
  document.title = `${state.left} → ${state.right}: DDP, side by side`;
  find("all").checked = Boolean(state.all);
  find("where").textContent = `${differences.length} differences`;
  describePair(pair);
  updateChips();
  if (state.mark) openMark();
  else if (left !== state.left || right !== state.right) scrollTo({ top: 0 });
  updateLinks();
}

function choose(side, other, name) {
  const swapped = name === state[other] ? { [other]: state[side] } : {};
  location.hash = writeAddress({ [side]: name, ...swapped });
}

function pressKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
  if (event.key === "n") stepDifference(1);
  if (event.key === "p") stepDifference(-1);
  if (event.key === "a") location.hash = writeAddress({ all: !state.all });
  if (event.key === "Escape") location.hash = writeAddress({ mark: null });
  const chip = [...find("marks").children].find(({ mark }) => mark === event.key);
  if (chip && !find("marks").hidden) location.hash = chip.hash;
}

function fillBar() {
  for (const [side, other] of [["left", "right"], ["right", "left"]]) {
    const options = names.map((name, n) => make("option", { value: name }, `${n + 1} ${name}.py`));
    find(side).append(...options);
    find(side).onchange = ({ target }) => choose(side, other, target.value);
  }
  for (const [mark, [title]] of Object.entries(data.recipe)) {
    const chip = makeLink(make("b", {}, mark), {});
    chip.append(" ", make("span", {}, title), make("small"));
    const label = { title: `${title} (key ${mark})`, ariaLabel: `${mark} ${title}` };
    find("marks").append(Object.assign(chip, { mark, ...label }));
  }
  find("next").onclick = () => stepDifference(1);
  find("previous").onclick = () => stepDifference(-1);
  find("all").onchange = ({ target }) => (location.hash = writeAddress({ all: target.checked }));
}

fillBar();
addEventListener("keydown", pressKey);
addEventListener("hashchange", render);
phone.addEventListener("change", render);
// Who selects text in one column copies that column alone.
table.onmousedown = ({ target }) => (table.dataset.side = target.closest("td")?.classList[0] || "");
find("bar").hidden = find("page").hidden = false;
render();
