"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const names = Object.keys(data.scripts);
const find = (id) => document.getElementById(id);
const table = document.querySelector("#page table");
const phone = matchMedia("(max-width: 700px)");
const context = 3; // equal lines that stay open around a difference
let state = {}; // what the address says: left, right, mark, all
let rows = []; // of the pair: {a, b: numbers of lines or null, equal, words, …}
let differences = []; // of each, the elements of its rows
let here = -1; // the difference that n and p have reached

function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// The address is #LEFT..RIGHT@MARK+all. All but the pair may be missing.

function readAddress() {
  const form = /^#(\w+)\.\.(\w+)(?:@([1-9]))?(\+all)?/;
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

// The rows of the table.

function readPair() {
  const turned = names.indexOf(state.left) > names.indexOf(state.right);
  const sides = turned ? [state.right, state.left] : [state.left, state.right];
  return { turned, ...data.pairs[sides.join("..")] };
}

function readRows(pair) {
  const [left, right] = [state.left, state.right].map((name) => data.scripts[name].lines);
  const found = pair.rows.map(([a, b, ...words]) => {
    if (pair.turned) [a, b, words] = [b, a, words.reverse()];
    const equal = left[a] === right[b];
    return { a, b, words, equal, unlike: !equal && !words.length };
  });
  return phone.matches ? separateUnlike(found) : found;
}

// In a single column, unlike lines stand one side after the other.
function separateUnlike(found) {
  const separate = [];
  const come = []; // the right side, until the unlike lines end
  for (const row of found) {
    if (!row.unlike) separate.push(...come.splice(0), row);
    if (row.unlike && row.a !== null) separate.push({ ...row, b: null });
    if (row.unlike && row.b !== null) come.push({ ...row, a: null });
  }
  return [...separate, ...come];
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
  return row.words.length && left.lines[row.a].trim() === right.lines[row.b].trim();
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
  cell.append(paint(script, number, row.words[left ? 0 : 1] || [], tag));
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
  const open = (wanted) => {
    lines.hidden = !wanted;
    button.ariaExpanded = String(wanted);
    button.textContent = `${wanted ? "▾" : "▸"} ${hidden.length} ${kind}${inside}`;
  };
  button.onclick = () => open(lines.hidden);
  open(state.all);
  const cell = make("td", { colSpan: 2 }, button);
  return [make("tbody", {}, make("tr", { className: "fold" }, cell)), lines];
}

// What is shown: of an open mark its lines alone; otherwise the differences below the imports,
// and the lines around them.
function chooseShown() {
  const ends = [state.left, state.right].map((name) => data.scripts[name].parts[1][2]);
  for (const row of rows) {
    row.marked = isMarked(state.left, row.a) || isMarked(state.right, row.b);
    const head = (row.a ?? 0) < ends[0] && (row.b ?? 0) < ends[1];
    row.shown = state.mark ? row.marked : !row.equal && !head;
  }
  const around = state.mark ? 0 : context;
  const isNear = (_, n) => rows.slice(Math.max(0, n - around), n + around + 1).some((row) => row.shown);
  return rows.map(isNear);
}

function fillTable() {
  for (const row of rows) row.element = make("tr", {}, makeCell(row, "a"), makeCell(row, "b"));
  for (const body of [...table.tBodies]) body.remove();
  [differences, here] = [[], -1];
  const visible = chooseShown();
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

// Whether a line stands at a place of the open mark.
function isMarked(name, line) {
  const isThere = ([mark, first, end]) => mark === state.mark && first <= line && line < end;
  return line !== null && data.scripts[name].marks.some(isThere);
}

function openMark() {
  const [title, sentences] = data.recipe[state.mark];
  const text = make("p", {}, make("b", {}, `${state.mark} ${title}. `));
  text.insertAdjacentHTML("beforeend", `${sentences} `);
  const href = writeAddress({ mark: null });
  text.append(make("a", { href }, "Show all differences"));
  const note = make("tr", { className: "note" }, make("td", { colSpan: 2 }, text));
  rows.find((row) => row.shown).element.before(note);
  reveal(note);
}

// A click on the chip of the open mark closes it.
function updateLinks() {
  find("swap").href = writeAddress({ left: state.right, right: state.left });
  const any = [state.left, state.right].some((name) => data.scripts[name].marks.length);
  find("marks").hidden = !any;
  find("unmarked").hidden = any;
  for (const chip of find("marks").children) {
    const current = chip.mark === state.mark;
    chip.href = writeAddress({ mark: current ? null : chip.mark });
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
  const isAbove = ([row]) => row.getBoundingClientRect().top <= top;
  const isSeen = (row) => {
    const place = row.getBoundingClientRect();
    return place.bottom > top && place.top < innerHeight;
  };
  const next = differences.filter(isAbove).length;
  if (differences[here]?.some(isSeen)) showDifference(here + step);
  else showDifference(step > 0 ? next : next - 1);
}

// The page as a whole.

function describePair(pair) {
  const isStep = ([left, right]) => left === state.left && right === state.right;
  const sentence = data.steps.find(isStep)?.[2] || "";
  const count = (side) => rows.filter((row) => !row.equal && row[side] !== null).length;
  const lines = `${count("a")} lines go and ${count("b")} come, with comments and docstrings.`;
  find("about").innerHTML = `${sentence} <small>${pair.statements} statements change. ${lines}</small>`;
  for (const door of document.querySelectorAll("nav a")) {
    const current = door.hash === `#${state.left}..${state.right}`;
    door.ariaCurrent = current ? "page" : null;
  }
}

function render() {
  const { left, right } = state;
  state = readAddress();
  const marks = [state.left, state.right].flatMap((name) => data.scripts[name].marks);
  if (!marks.some(([mark]) => mark === state.mark)) state.mark = null;
  if (location.hash) history.replaceState(null, "", writeAddress()); // What it says is what is shown.
  const pair = readPair();
  rows = readRows(pair);
  fillTable();
  for (const [index, side] of ["left", "right"].entries()) {
    find(side).value = state[side];
    table.tHead.rows[0].cells[index].textContent = `${state[side]}.py`;
  }
  document.title = `${state.left} → ${state.right}: DDP, side by side`;
  find("all").checked = Boolean(state.all);
  find("where").textContent = `${differences.length} differences`;
  describePair(pair);
  updateLinks();
  if (state.mark) openMark();
  else if (left !== state.left || right !== state.right) scrollTo({ top: 0 });
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
    const label = { title: `${title} (key ${mark})`, ariaLabel: `${mark} ${title}` };
    const chip = make("a", { mark, ...label }, make("b", {}, mark), " ", make("span", {}, title));
    find("marks").append(chip);
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
