// The sections of the page, drawn from the JSON in #data. A section without figures stays hidden.

const data = JSON.parse(document.getElementById('data').textContent);
const all = data.configurations;
const trained = all.filter((c) => c.rounds > 0);
const metric = (c, name) => known(c.metrics[name]) ? c.metrics[name].median : null;
const stepPart = (c, name) => c.step_parts_ms ? c.step_parts_ms[name] : null;

function section(id, lead) {
  const node = document.getElementById(id);
  node.hidden = false;
  node.querySelector('.lead').append(lead);
  return node;
}
const figureOf = (node, i = 0) => node.querySelectorAll('figure')[i];

function best(value) {
  const candidates = trained.filter((c) => known(value(c)));
  return candidates.length === 0 ? null : candidates.reduce((a, b) => value(b) < value(a) ? b : a);
}

function cards() {
  const box = document.getElementById('cards');
  const card = (title, figure, unit, who) => box.append(el('div', {class: 'card'}, el('h3', {}, title),
      el('p', {class: 'figure'}, figure + ' ', el('small', {}, unit)), el('p', {class: 'who'}, who)));
  const equal = trained.filter((c) => c.parity.kind === 'equal bits').length;
  card('Equal bits', `${equal} of ${all.length}`, '', 'with ' + data.baseline);
  const named = (c) => c.name + (c.parity.kind === 'differs' ? ', whose parity fails' : '');
  const fast = data.fastest && all.find((c) => c.name === data.fastest.name);
  if (fast) {
    const others = data.fastest.not_told_apart_from;
    const names = others.slice(0, 2).join(', ') + (others.length > 2 ? ` and ${others.length - 2} more` : '');
    card('Fastest step', short(metric(fast, 'step_ms')), 'ms', named(fast) + (others.length > 0 ? `; not told apart from ${names}` : ''));
  }
  const small = best((c) => c.peak_bytes ? c.peak_bytes.total : null);
  if (small) card('Least memory on a rank', short(small.peak_bytes.total / MIB), 'MiB', named(small));
  const sent = best((c) => metric(c, 'sent_bytes'));
  if (sent) card('Least sent in a step', short(metric(sent, 'sent_bytes') / MIB), 'MiB', named(sent));
  else {
    const exposed = best((c) => metric(c, 'exposed_comm_ms'));
    if (exposed) card('Least exposed waiting', short(metric(exposed, 'exposed_comm_ms')), 'ms', named(exposed));
  }
}

// The table stands in the page already; this makes its columns sort.
function sortable() {
  const node = document.querySelector('#table table');
  const heads = [...node.tHead.rows[0].cells];
  const body = node.tBodies[0];
  heads.forEach((head, i) => {
    const button = el('button', {type: 'button'}, ...head.childNodes);
    head.append(button);
    button.addEventListener('click', () => {
      const down = head.getAttribute('aria-sort') === 'ascending';
      heads.forEach((other) => other.removeAttribute('aria-sort'));
      head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
      const key = (row) => row.cells[i].dataset.value ?? row.cells[i].textContent;
      const order = (a, b) => {
        const x = key(a), y = key(b), p = parseFloat(x), q = parseFloat(y);
        if (x === '' || y === '') return (x === '') - (y === '');  // unknown is last, either way
        const less = Number.isNaN(p) || Number.isNaN(q) ? x.localeCompare(y) : p - q;
        return down ? -less : less;
      };
      body.append(...[...body.rows].sort(order));
    });
  });
}

function lossSection() {
  const base = all.find((c) => c.name === data.baseline);
  if (!base.loss_points) return;
  const others = trained.filter((c) => c !== base && c.loss_points);
  const off = others.filter((c) => c.loss_points.difference.some((d) => d !== 0));
  const exact = others.length - off.length;
  const equal = others.filter((c) => c.parity.kind === 'equal bits').length;
  let answer = `${equal} of ${others.length} have the bits of the baseline`;
  if (others.length === 0) {
    answer = 'There is only the baseline.';
  } else if (equal === others.length) {
    answer = 'Yes, to the bit: every difference to the baseline is exactly 0.';
  } else if (exact > equal) {
    answer += `; ${exact - equal} more have the losses drawn here, and differ in another round or in the parameters at the end.`;
  } else {
    answer += '; the others differ as drawn.';
  }
  const node = section('loss', answer);
  figureOf(node, 0).append(legend([{name: `loss of ${data.baseline}`, color: 'var(--c0)'}]));
  responsive(figureOf(node, 0), (width) => lossPlot(width, base.loss_points));
  const lines = new Map();  // those that differ alike are one line
  for (const c of off) {
    const key = JSON.stringify(c.loss_points.difference);
    lines.set(key, [...(lines.get(key) || []), c]);
  }
  const groups = [...lines.values()];
  const shown = groups.slice(0, 6).map((group) => group[0]);
  const series = (i) => [1, 2, 3, 5, 7, 0][i];
  const items = shown.map((c, i) => ({
    name: groups[i].length === 1 ? c.name : `${groups[i].length} alike: ${c.name}, ...`, color: `var(--c${series(i)})`,
  }));
  if (exact > 0) items.unshift({name: `${exact} × exactly 0`, color: 'var(--c4)'});
  if (off.some((c) => c.parity.changes_arithmetic.length > 0)) {
    items.push({name: `tolerance ${data.tolerance}`, color: 'var(--soft)', kind: 'dash'});
  }
  figureOf(node, 1).append(legend(items));
  responsive(figureOf(node, 1), (width) => differencePlot(width, base.loss_points.step, shown, exact, series));
  if (groups.length > shown.length) {
    figureOf(node, 1).append(el('p', {class: 'note'}, `${groups.length - shown.length} more lines are in the table below.`));
  }
  node.append(figures('The distances as a table', ['configuration', 'largest difference', 'first step', 'parameters', 'why it may differ'],
      trained.map((c) => [c.name, known(c.parity.max_loss_difference) ? String(c.parity.max_loss_difference) : 'not finite',
                          known(c.parity.first_step) ? String(c.parity.first_step) : '-',
                          c.parity.equal_parameters ? 'equal' : 'differ', c.parity.changes_arithmetic.join(', ') || 'must be equal'])));
}

const CATEGORIES = [['parameter_shard', 'parameters'], ['gathered_parameter', 'gathered parameters'], ['gradient', 'gradients'],
                    ['optimizer', 'optimizer'], ['activation', 'activations'], ['communication', 'communication'], ['workspace', 'workspace']];

function memorySection() {
  const rows = trained.filter((c) => c.peak_bytes);
  if (rows.length === 0) return;
  const parts = (bytes) => CATEGORIES.map(([key, name], i) => ({value: bytes[key] || 0, series: i, name}));
  const listing = (bytes) => CATEGORIES.filter(([key]) => bytes[key] > 0).map(([key, name]) => `${name} ${mib(bytes[key])}`).join(' · ');
  const hosts = rows.some((c) => c.host_peak_bytes && c.host_peak_bytes.total > 0);
  const planned = rows.some((c) => c.planned && c.planned.peak_bytes && known(c.planned.peak_bytes.total));
  const node = section('memory', 'The peak of each category on one rank. Peaks need not fall together: the mark is the most that was in use at one time, '
      + 'and the figure is of that.' + (hosts ? ' The thin bar is memory of the host, where offloaded state lies.' : '')
      + (planned ? '' : ' No plan was recorded, so nothing is shown as planned.'));
  barChart(figureOf(node), rows.map((c) => ({
    label: c.name, segments: parts(c.peak_bytes), thin: c.host_peak_bytes ? parts(c.host_peak_bytes) : null,
    marks: known(c.peak_bytes.total) ? [{value: c.peak_bytes.total, name: 'peak'}] : [], value: mib(c.peak_bytes.total),
    text: listing(c.peak_bytes) + (c.host_peak_bytes && c.host_peak_bytes.total > 0 ? ` · on the host ${mib(c.host_peak_bytes.total)} (${listing(c.host_peak_bytes)})` : '')
        + (c.planned && c.planned.peak_bytes ? ` · planned ${mib(c.planned.peak_bytes.total)}` : ''),
  })), {title: 'Peak memory by category', hint: 'Point at a bar, or use the arrow keys, for its figures.',
        legend: CATEGORIES.filter(([key]) => rows.some((c) => c.peak_bytes[key] > 0 || (c.host_peak_bytes && c.host_peak_bytes[key] > 0)))
            .map(([key, name]) => ({name, color: `var(--c${CATEGORIES.findIndex(([k]) => k === key)})`}))
            .concat([{name: 'peak of all together', color: 'var(--ink)', kind: 'tick'}])});
  const formulas = [];
  const seen = new Set();
  for (const c of rows) {
    for (const f of c.theory.memory) {
      if (f.bytes === 0) continue;
      const measured = c.peak_bytes[f.name];
      const line = [f.name.replace('_', ' '), f.words, f.numbers, mib(f.bytes), mib(measured)];
      const key = c.strategy + line.join('|');
      if (seen.has(key)) continue;
      seen.add(key);
      formulas.push([c.name, ...line]);
    }
  }
  if (formulas.length > 0) {
    node.append(figures('Why it is so much: the formulas beside what was measured',
                        ['configuration', 'category', 'formula', 'in numbers', 'by formula', 'measured'], formulas, formulas.length <= 20));
  }
}

// The arithmetic of each category, whose measured peak stands in its first row. Of many terms the smaller ones are behind a fold.
function termRows(terms, where, measured) {
  const label = Object.fromEntries(CATEGORIES);
  const bytes = (value) => value.toLocaleString('en-US');
  return [...new Set(terms.map((t) => t.category))].flatMap((category) => {
    const own = terms.filter((t) => t.category === category);
    const shown = own.slice(0, own.length > 6 ? 5 : 6), rest = own.slice(shown.length);
    const rows = shown.map((t) => ['', t.text, bytes(t.bytes), '']);
    if (rest.length > 0) {
      rows.push(['', el('details', {}, el('summary', {}, `${rest.length} smaller terms`),
                        el('ul', {}, ...rest.map((t) => el('li', {}, `${t.text}: ${bytes(t.bytes)} B`)))),
                 bytes(rest.reduce((sum, t) => sum + t.bytes, 0)), '']);
    }
    rows[0][0] = (label[category] || category) + where;
    rows[0][3] = measured(category);
    return rows;
  });
}

// One step of a configuration that is picked, and the arithmetic of its plan beside it.
function stepMemorySection() {
  const steps = (data.memory || []).filter((s) => s.memory);
  if (steps.length === 0) return;
  const node = section('step-memory', 'What is held from moment to moment of one step on one rank, and why: shards, gradients, optimizer state and the slots '
      + 'that parameters are gathered into are held throughout; activations grow through forward and shrink through backward, workspace and messages come and go. '
      + 'All have one scale.');
  const figure = figureOf(node);
  const pick = el('select', {'aria-label': 'configuration'}, ...steps.map((s, i) => el('option', {value: i}, s.name)));
  node.querySelector('.pickers').append(el('label', {}, 'configuration', pick));
  const row = (step) => all.find((c) => c.name === step.name);
  const peakOf = (step) => row(step) && row(step).peak_bytes ? row(step).peak_bytes.total : null;
  const most = Math.max(...steps.flatMap((s) => [...s.memory.total, peakOf(s) || 0])) * 1.04;
  figure.append(legend(CATEGORIES.map(([key, name], i) => ({key, name, color: `var(--c${i})`}))
      .filter(({key}) => steps.some((s) => s.memory.bytes[key] && Math.max(...s.memory.bytes[key]) > 0))
      .concat([{name: 'measured peak', color: 'var(--soft)', kind: 'dash'}])));
  const measured = (step, where, category) => row(step) && row(step)[where] ? (row(step)[where][category] || 0).toLocaleString('en-US') : 'not measured';
  const holder = el('div');
  const terms = el('div');
  const update = () => {
    const step = steps[pick.selectedIndex];
    const {ms: at, bytes, total} = step.memory;
    const peak = peakOf(step);
    let plot = null;
    const area = el('div', {class: 'explore', role: 'group', 'aria-label': `Memory of ${step.name}`});
    const {readout, go} = explorable(area, at.length, (i, on) => {
      if (plot === null) return;
      plot.cursor.setAttribute('visibility', on ? 'visible' : 'hidden');
      plot.cursor.setAttribute('transform', `translate(${plot.xOf(i)})`);
    }, (i) => [`at ${ms(at[i])}:`, `${mib(total[i])} · ` + CATEGORIES.filter(([key]) => bytes[key] && bytes[key][i] > 0)
        .map(([key, name]) => `${name} ${mib(bytes[key][i])}`).join(' · ')], 'Point at a moment, or use the arrow keys.');
    holder.replaceChildren(area, readout, el('p', {class: 'note'}, (trained.length > steps.length ? `The first ${steps.length} of ${trained.length}. ` : '') + (step.source === 'plan'
        ? 'As planned: books and order are those of the real schedule, time is simulated.' : 'As traced, the last step that was.')
        + ' What a single kernel takes and gives back is in the peak alone.'));
    responsive(area, (width) => {
      plot = stepMemoryPlot(width, step, most, known(peak) ? [{value: peak, name: 'measured peak'}] : []);
      plot.node.addEventListener('pointermove', (event) => go(plot.nearest(event.clientX - plot.node.getBoundingClientRect().left)));
      return plot.node;
    });
    const rows = [...termRows(step.terms || [], '', (category) => measured(step, 'peak_bytes', category)),
                  ...termRows(step.host_terms || [], ', on the host', (category) => measured(step, 'host_peak_bytes', category))];
    terms.replaceChildren(...(rows.length > 0 ? [figures('Why: the arithmetic of the plan',
        ['category', 'arithmetic', 'bytes', 'measured peak'], rows, true)] : []));
  };
  figure.append(holder);
  node.append(terms);
  pick.selectedIndex = steps.length - 1;
  pick.addEventListener('change', update);
  update();
}

// Of the time of a step, and which colour.
const PARTS = [['compute_ms', 'forward and backward', 0], ['exposed_comm_ms', 'exposed communication', 2],
               ['optimizer_ms', 'optimizer', 3], ['data_ms', 'data', 5]];

function timeSection() {
  const rows = trained.filter((c) => known(metric(c, 'step_ms')));
  if (rows.length === 0) return;
  const shown = PARTS.filter(([key]) => rows.some((c) => known(stepPart(c, key))));
  const untold = PARTS.filter((p) => !shown.includes(p)).map(([, name]) => name);
  const rest = untold.length > 0 ? 'not split further' : 'the rest';
  const node = section('time', 'The median step on rank 0, without warm-up, taken apart by what each part takes of the time of all steps. Exposed communication is what computation waited for; hidden communication costs no time here.'
      + (untold.length > 0 ? ` Not measured: ${untold.join(', ')}.` : ''));
  barChart(figureOf(node), rows.map((c) => {
    const step = metric(c, 'step_ms');
    const segments = shown.filter(([key]) => known(stepPart(c, key))).map(([key, name, series]) => ({value: stepPart(c, key), series, name}));
    segments.push({value: Math.max(0, stepPart(c, 'other_ms')), series: 6, name: rest});
    const {q1, q3} = c.metrics.step_ms;
    const overlap = metric(c, 'overlap');
    return {label: c.name, segments, value: ms(step),
            text: `half of all steps took ${short(q1)} to ${ms(q3)} · ` + segments.map((s) => `${s.name} ${ms(s.value)}`).join(' · ')
                + (known(overlap) ? ` · ${Math.round(100 * overlap)} % of communication overlapped` : '')};
  }), {title: 'Where the time of a step goes', hint: 'Point at a bar, or use the arrow keys, for its figures.',
       legend: shown.map(([, name, series]) => ({name, color: `var(--c${series})`})).concat([{name: rest, color: 'var(--c6)'}])});
}

function communicationSection() {
  const rows = trained.filter((c) => known(metric(c, 'sent_bytes')) || c.theory.sent);
  if (rows.length === 0) return;
  const measured = rows.some((c) => known(metric(c, 'sent_bytes')));
  const planned = rows.some((c) => c.planned && known(c.planned.sent_bytes));
  const node = section('communication', 'Bytes that one rank sends in a step. The mark is the formula of the strategy, if every collective is a ring of its n ranks.'
      + (measured ? '' : ' What was sent was not measured in these runs, so the marks stand alone.'));
  barChart(figureOf(node), rows.map((c) => {
    const sent = metric(c, 'sent_bytes');
    const formula = c.theory.sent;
    const plan = c.planned && known(c.planned.sent_bytes) ? ` · planned ${mib(c.planned.sent_bytes)}` : '';
    return {label: c.name, segments: known(sent) ? [{value: sent, series: 0, name: 'measured'}] : [],
            marks: formula ? [{value: formula.bytes, name: 'theory'}] : [],
            value: known(sent) ? mib(sent) : formula ? '≈ ' + mib(formula.bytes) : 'not measured',
            text: (known(sent) ? `measured ${mib(sent)}` : 'not measured') + plan
                + (known(metric(c, 'num_collectives')) ? ` · ${metric(c, 'num_collectives')} collectives` : '')
                + (formula ? ` · by formula ${mib(formula.bytes)}` : ' · no formula for these options')};
  }), {title: 'Bytes sent against theory', hint: 'Point at a bar, or use the arrow keys, for its figures.',
       legend: [...(measured ? [{name: 'measured', color: 'var(--c0)'}] : []), {name: 'by formula', color: 'var(--ink)', kind: 'tick'}]});
  node.append(figures('The formulas', ['configuration', 'formula', 'in numbers', 'by formula', 'measured', ...(planned ? ['planned'] : [])],
      rows.filter((c) => c.theory.sent).map((c) => [c.name, c.theory.sent.words, c.theory.sent.numbers, mib(c.theory.sent.bytes),
          mib(metric(c, 'sent_bytes')), ...(planned ? [mib(c.planned && c.planned.sent_bytes)] : [])])));
}

function paretoSection() {
  const rows = trained.filter((c) => c.peak_bytes && known(c.peak_bytes.total) && known(metric(c, 'tokens_per_s')));
  if (rows.length < 2) return;
  const front = rows.filter((c) => c.on_pareto_front).sort((a, b) => a.peak_bytes.total - b.peak_bytes.total);
  const node = section('pareto', `Up and to the left is better. ${front.length === 1 ? 'One is' : front.length + ' are'} beaten by no other (the dashed front): `
      + front.map((c, i) => `${i + 1} ${c.name}`).join('; ') + '.');
  const strategies = [...new Set(rows.map((c) => c.strategy))];
  figureOf(node).append(legend(strategies.map((name, i) => ({name, color: `var(--c${i % 8})`})).concat([{name: 'Pareto front', color: 'var(--soft)', kind: 'dash'}])));
  let dots = [];
  responsive(figureOf(node), (width) => {
    const plot = paretoPlot(width, rows, front, strategies);
    dots = plot.dots;
    dots.forEach((dot, i) => dot.addEventListener('pointerenter', () => explore.go(i)));
    return plot.node;
  });
  const explore = explorable(figureOf(node), rows.length, (i, on) => dots[i].classList.toggle('active', on),
      (i) => [rows[i].name + ':', `${short(metric(rows[i], 'tokens_per_s'))} tokens/s · ${mib(rows[i].peak_bytes.total)}`
              + (rows[i].on_pareto_front ? ` · number ${front.indexOf(rows[i]) + 1} of the front` : '')], 'Point at a dot, or use the arrow keys.');
  dots.forEach((dot, i) => dot.addEventListener('pointerenter', () => explore.go(i)));
  figureOf(node).append(explore.readout);
}

function sidesSection() {
  if (trained.length < 2) return;
  const node = section('sides', '');
  const holder = node.querySelector('.scroller');
  const options = () => trained.map((c, i) => el('option', {value: i}, c.name));
  const selects = ['Left', 'Right'].map((name) => el('select', {'aria-label': name}, ...options()));
  node.querySelector('.pickers').append(...selects.map((s, i) => el('label', {}, ['Left', 'Right'][i], s)));
  selects[1].selectedIndex = trained.length - 1;
  const update = () => {
    const [a, b] = selects.map((s) => trained[s.selectedIndex]);
    const rows = [];
    const add = (name, value, format, unknown = 'not measured') => {
      const x = value(a), y = value(b);
      const amount = (v) => known(v) ? format(v) : unknown;
      const ratio = known(x) && known(y) && x > 0 ? '× ' + (y / x).toFixed(2) : '';
      rows.push([name, amount(x), amount(y), ratio]);
    };
    rows.push(['numbers', a.parity.kind, b.parity.kind, '']);
    add('last loss', (c) => c.last_loss, (loss) => loss.toPrecision(7), 'not finite');
    add('step', (c) => metric(c, 'step_ms'), ms);
    for (const [key, name] of [...PARTS, ['other_ms', 'the rest']]) add('· ' + name, (c) => stepPart(c, key), ms);
    add('communication overlapped', (c) => metric(c, 'overlap'), (part) => `${Math.round(100 * part)} %`);
    add('tokens/s', (c) => metric(c, 'tokens_per_s'), short);
    for (const [where, title] of [['peak_bytes', 'peak memory'], ['host_peak_bytes', 'on the host']]) {
      if (!a[where] && !b[where]) continue;
      add(title, (c) => c[where] && c[where].total, mib);
      for (const [key, name] of CATEGORIES) {
        if ((a[where] && a[where][key] > 0) || (b[where] && b[where][key] > 0)) add('· ' + name, (c) => c[where] && c[where][key], mib);
      }
    }
    add('sent in a step', (c) => metric(c, 'sent_bytes'), mib);
    add('collectives in a step', (c) => metric(c, 'num_collectives'), String);
    for (const key of new Set([...Object.keys(a.changed), ...Object.keys(b.changed)])) {
      const of = (c) => String(key in c.changed ? c.changed[key] : data.options[key]);
      if (of(a) !== of(b)) rows.push([key, of(a), of(b), '']);
    }
    holder.replaceChildren(table(['', a.name, b.name, 'right / left'], rows));
  };
  selects.forEach((s) => s.addEventListener('change', update));
  update();
}

for (const draw of [cards, sortable, lossSection, memorySection, stepMemorySection, timeSection, communicationSection, paretoSection, ganttSection, sidesSection]) {
  try {
    draw();
  } catch (error) {
    tellError(`${draw.name}: ${error.message}`);
  }
}
document.documentElement.dataset.errors = String(errors.length);
document.documentElement.dataset.drawn = 'yes';
