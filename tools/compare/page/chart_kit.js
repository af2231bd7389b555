'use strict';
// What the charts are made of. Names come from files and command lines: they only ever become text nodes and attributes.

const errors = [];
window.addEventListener('error', (event) => tellError(event.message));
function tellError(message) {
  errors.push(String(message));
  document.documentElement.dataset.errors = String(errors.length);
  const box = document.createElement('p');
  box.className = 'errors';
  box.textContent = 'This page has an error: ' + message;
  document.querySelector('main').prepend(box);
}

const known = (value) => value !== null && value !== undefined;

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// As many digits as are worth reading.
function short(value) {
  if (value === 0) return '0';
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString('en-US');
  if (size >= 100) return value.toFixed(0);
  if (size >= 10) return value.toFixed(1);
  if (size >= 0.1) return value.toFixed(2);
  return size >= 1e-4 ? String(Number(value.toPrecision(2))) : value.toExponential(1);
}
const count = (value) => value.toLocaleString('en-US');
const UNKNOWN = 'not measured';
function ms(value) {
  if (!known(value)) return UNKNOWN;
  if (value > 0 && value < 0.1) return short(value * 1000) + ' µs';
  return value < 10000 ? short(value) + ' ms' : short(value / 1000) + ' s';
}
// The largest unit of which there is at least a tenth, but bytes up to 10,240.
const BYTES = [['GiB', 1024 ** 3], ['MiB', 1024 ** 2], ['KiB', 1024]];
function byteUnit(bytes) {
  return bytes < 10240 ? ['B', 1] : BYTES.find(([name, size]) => bytes >= (name === 'GiB' ? size : 0.1 * size)) || BYTES[2];
}
function amount(bytes) {
  if (!known(bytes)) return UNKNOWN;
  const [name, size] = byteUnit(bytes);
  return `${size === 1 ? count(bytes) : short(bytes / size)} ${name}`;
}

// Round numbers from 0 to at least `most`.
function ticks(most, count = 5) {
  if (!(most > 0)) return [0, 1];
  const rough = most / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((f) => f * power).find((s) => s >= rough);
  const result = [];
  for (let i = 0; ; ++i) {
    result.push(i * step);
    if (i * step >= most * 0.999) return result;
  }
}

// Round numbers between two, about `count` of them.
function ticksBetween(low, high, count) {
  const step = ticks(high - low, count)[1];
  const result = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high; v += step) result.push(Number(v.toPrecision(12)));
  return result;
}
const tickText = (v) => Number(v.toPrecision(12)).toLocaleString('en-US', {maximumFractionDigits: 9});

function legend(items) {
  const list = el('ul', {class: 'legend'});
  for (const {name, color, kind} of items) {
    const swatch = el('i', {class: kind || '', 'aria-hidden': 'true'});
    swatch.style.setProperty('--swatch', color);
    list.append(el('li', {}, swatch, name));
  }
  return list;
}

// Cells are strings or nodes. A column of words, or with a long cell, is to the left; others are of figures.
function table(head, rows) {
  const isLong = (cell) => typeof cell !== 'string' || cell.length > 34;
  const isWord = (cell) => /^(\p{L}|$)/u.test(cell) && cell !== UNKNOWN;
  const styleOf = (cells) => cells.some(isLong) ? 'text wrap' : cells.some((c) => c !== '') && cells.every(isWord) ? 'text' : '';
  const styles = head.map((_, i) => styleOf(rows.map((row) => row[i])));
  const result = el('table', {}, el('thead', {}, el('tr', {}, ...head.map((h, i) => el('th', {scope: 'col', class: styles[i]}, h)))));
  const body = el('tbody');
  for (const row of rows) {
    body.append(el('tr', {}, ...row.map((cell, i) => i === 0 ? el('th', {scope: 'row'}, cell)
        : el('td', {class: styles[i] + (cell === UNKNOWN ? ' unknown' : '')}, cell))));
  }
  result.append(body);
  return stacks(result);
}

// Where it is narrow a row is a block of labelled lines; the roles keep it a table for those who hear it.
function stacks(table) {
  table.classList.add('stacks');
  table.setAttribute('role', 'table');
  for (const part of [table.tHead, ...table.tBodies]) part.setAttribute('role', 'rowgroup');
  const heads = [...table.tHead.rows[0].cells].map((head) => head.textContent);
  for (const row of table.rows) {
    row.setAttribute('role', 'row');
    [...row.cells].forEach((cell, i) => {
      cell.setAttribute('role', cell.scope === 'col' ? 'columnheader' : cell.scope === 'row' ? 'rowheader' : 'cell');
      if (cell.tagName === 'TD' && cell.colSpan === 1) cell.dataset.label = heads[i];
    });
  }
  return table;
}

// The figures of a chart as a table, for whoever cannot or would not see it.
function figures(title, head, rows, open = false) {
  return el('details', open ? {open: ''} : {}, el('summary', {}, title),
            el('div', {class: 'scroller', role: 'region', 'aria-label': title, tabindex: '0'}, table(head, rows)));
}

// One tab stop: arrow keys go from mark to mark, and so does the pointer. `tell(i)` gives [bold, rest] of the line below.
function explorable(area, count, mark, tell, hint) {
  const readout = el('p', {class: 'readout', 'aria-live': 'polite'}, hint);
  let active = -1;
  const go = (i) => {
    if (i === active || count === 0) return;
    if (active >= 0) mark(active, false);
    active = (i + count) % count;
    mark(active, true);
    const [bold, rest] = tell(active);
    readout.replaceChildren(el('b', {}, bold), ' ' + rest);
  };
  area.setAttribute('tabindex', '0');
  area.addEventListener('keydown', (event) => {
    const step = {ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1}[event.key];
    if (step === undefined) return;
    event.preventDefault();
    go(active < 0 && step < 0 ? count - 1 : active + step);
  });
  return {readout, go};
}

// Bars that lie one below the other. Each row: {label, segments: [{value, series, name}], value, marks: [{value, name}],
// thin: a second bar of segments}. Values share one scale.
function barChart(figure, rows, options) {
  const sum = (segments) => segments.reduce((total, s) => total + s.value, 0);
  const most = Math.max(...rows.flatMap((row) => [
    sum(row.segments), ...(row.marks || []).map((m) => m.value), ...(row.thin ? [sum(row.thin)] : [])]), 1e-12);
  const list = el('ul', {class: 'bars', role: 'group', 'aria-label': options.title});
  const bar = (segments, marks, thin) => {
    const node = svg('svg', {role: 'presentation', class: thin ? 'thin' : '', preserveAspectRatio: 'none'});
    node.append(svg('rect', {class: 'track', width: '100%', height: '100%', rx: 4}));
    let at = 0;
    for (const {value, series, name} of segments) {
      if (!(value > 0)) continue;
      node.append(svg('rect', {class: 's' + series, x: 100 * at / most + '%', width: 100 * value / most + '%',
                               height: '100%', 'data-name': name, 'data-value': value}));
      at += value;
    }
    for (const {value, name} of marks || []) {
      const part = 100 * value / most;
      node.append(svg('rect', {class: 'tick', x: part + '%', transform: `translate(${part > 99 ? -3 : -1.5})`, width: 3,
                               height: '100%', 'data-name': name, 'data-value': value}));
    }
    return node;
  };
  const items = rows.map((row) => {
    const cell = el('div', {class: 'track-cell'}, bar(row.segments, row.marks, false));
    if (row.thin && sum(row.thin) > 0) cell.append(bar(row.thin, [], true));
    return el('li', {}, el('span', {class: 'label'}, row.label), cell, el('span', {class: 'value'}, row.value));
  });
  list.append(...items);
  const {readout, go} = explorable(list, rows.length, (i, on) => items[i].classList.toggle('active', on),
                                   (i) => [rows[i].label + ':', rows[i].text], options.hint);
  items.forEach((item, i) => item.addEventListener('pointerenter', () => go(i)));
  figure.append(legend(options.legend), list, readout);
}

// Draws now, whenever the width changes, and for paper. `draw(width)` returns an svg.
const PAPER_WIDTH = 640;
const drawings = [];
function responsive(figure, draw) {
  const holder = el('div');
  figure.append(holder);
  let last = 0;
  const update = (paper) => {
    const width = paper ? Math.floor(PAPER_WIDTH * paper) : Math.floor(holder.clientWidth);
    if (width === 0 || width === last || !holder.isConnected) return;
    last = width;
    try {
      holder.replaceChildren(draw(width));
    } catch (error) {
      tellError(error.message);
    }
  };
  drawings.push((isPaper) => update(isPaper ? (figure.closest('.panels') ? 0.52 : 1) : 0));
  new ResizeObserver(() => update(0)).observe(holder);
  update(0);
}
window.addEventListener('beforeprint', () => drawings.forEach((draw) => draw(true)));
window.addEventListener('afterprint', () => drawings.forEach((draw) => draw(false)));

const text = (x, y, words, attributes = {}) => svg('text', {x, y, ...attributes}, words);
