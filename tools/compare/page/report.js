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

// All with the least `value` of those that are known.
function least(value) {
  const candidates = trained.filter((c) => known(value(c)));
  const lowest = Math.min(...candidates.map(value));
  return candidates.filter((c) => value(c) === lowest);
}
const withOthers = (names) => names[0] + (names.length > 1 ? ` and ${names.length - 1} other${names.length > 2 ? 's' : ''} alike` : '');

function cards() {
  const box = document.getElementById('cards');
  const card = (title, figure, unit, who) => box.append(el('div', {class: 'card'}, el('dt', {}, title),
      el('dd', {class: 'figure'}, figure, ...(unit ? [' ', el('small', {}, unit)] : [])), el('dd', {class: 'who'}, who)));
  const isAsItMustBe = (c) => c.parity.kind !== 'differs' && c.parity.kind !== 'unknown';
  card('Equal bits', `${trained.filter(isAsItMustBe).length} of ${trained.length}`, '',
       data.classes.length > 1 ? `within each of ${data.classes.length} classes of equal arithmetic` : 'with ' + data.baseline);
  const leastOf = (title, value) => {
    const found = least(value);
    if (found.length === 0) return false;
    const [figure, unit] = amount(value(found[0])).split(' ');
    card(title, figure, unit, withOthers(found.map((c) => c.name + (c.parity.kind === 'differs' ? ', whose parity fails,' : ''))).replace(/,$/, ''));
    return true;
  };
  const fast = data.fastest && all.find((c) => c.name === data.fastest.name);
  const others = fast ? data.fastest.not_told_apart_from : [];
  if (fast && others.length > 0 && others.length === trained.length - 1) {
    card('Fastest', 'None stands out', '', `all ${trained.length} are as fast within noise`);
  } else if (fast) {
    card('Fastest', short(metric(fast, 'tokens_per_s')), 'tokens/s', fast.name
        + (fast.parity.kind === 'differs' ? ', whose parity fails' : '') + `, ${ms(metric(fast, 'step_ms'))} a step`
        + (others.length === 1 ? `; ${others[0]} may be as fast` : others.length > 1 ? `; ${others.length} others may be as fast` : ''));
  } else if (known(data.rounds_needed)) {
    card('Fastest', 'Too few rounds', '', `to say: it takes --rounds=${data.rounds_needed}`);
  }
  leastOf('Least memory on a rank', (c) => c.peak_bytes ? c.peak_bytes.total : null);
  leastOf('Least sent in a step', (c) => metric(c, 'sent_bytes'));
}

// The table stands in the page already; this makes its columns sort.
function sortable() {
  const node = stacks(document.querySelector('#table table'));
  const heads = [...node.tHead.rows[0].cells];
  const body = node.tBodies[0];
  heads.forEach((head, i) => {
    const button = el('button', {type: 'button'}, ...head.childNodes);
    head.append(button);
    button.addEventListener('click', () => {
      const down = head.getAttribute('aria-sort') === 'ascending';
      heads.forEach((other) => other.removeAttribute('aria-sort'));
      head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
      const key = (row) => row.cells[i] ? row.cells[i].dataset.value ?? row.cells[i].textContent : '';
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

// What the losses say, in a sentence.
function parityAnswer() {
  const differing = trained.filter((c) => c.parity.kind === 'differs').length;
  if (trained.length < 2) return 'There is only the baseline.';
  if (differing > 0) return `No: ${differing} of ${trained.length} differ from what they must be.`;
  if (data.classes.length === 1) return `Yes, to the bit: all ${trained.length} have the same losses and parameters.`;
  return `Yes, to the bit within each of ${data.classes.length} classes of equal arithmetic; from class to class losses differ as drawn.`;
}

function lossSection() {
  const base = all.find((c) => c.name === data.baseline);
  if (!base.loss_points) return;
  const others = trained.filter((c) => c !== base && c.loss_points && c.parity.kind !== 'another training');
  const off = others.filter((c) => c.loss_points.difference.some((d) => d !== 0));
  const exact = others.length - off.length;
  const node = section('loss', parityAnswer());
  const trainings = [base, ...data.classes.filter((k) => k.is_another_training).map((k) => trained.find((c) => c.name === k.reference))]
      .filter((c) => c && c.loss_points).slice(0, 6);
  figureOf(node, 0).append(legend(trainings.map((c, i) => ({name: `loss of ${c.name}`, color: `var(--c${i})`}))));
  responsive(figureOf(node, 0), (width) => lossPlot(width, trainings.map((c) => c.loss_points)));
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
  if (exact > 0) items.unshift({name: `${exact + 1} × exactly 0, the baseline among them`, color: 'var(--c4)'});
  if (off.some((c) => c.parity.changes_arithmetic.length > 0)) {
    items.push({name: `tolerance ${data.tolerance}`, color: 'var(--soft)', kind: 'dash'});
  }
  figureOf(node, 1).append(legend(items));
  responsive(figureOf(node, 1), (width) => differencePlot(width, base.loss_points.step, shown, exact, series));
  if (groups.length > shown.length) {
    figureOf(node, 1).append(el('p', {class: 'note'}, `${groups.length - shown.length} more lines are in the table below.`));
  }
  if (data.classes.length > 1) {
    node.append(figures('Classes of equal arithmetic', ['class', 'what sets it apart', 'trained', 'its losses'], data.classes.map((k, i) => {
      const members = trained.filter((c) => c.class === i);
      const first = members.find((c) => c.name === k.reference);
      return [`class ${i + 1}`, k.label || 'that of the baseline', String(members.length),
              i === 0 ? 'the baseline' : k.is_another_training ? 'another training' : first ? `${first.numbers} from ${first.parity.reference}` : UNKNOWN];
    }), true));
  }
  node.append(figures('The distances as a table', ['configuration', 'measured against', 'largest difference', 'first step', 'parameters', 'why it may differ'],
      trained.map((c) => [c.name, c.parity.reference || '-',
                          c.parity.kind === 'another training' ? '-' : known(c.parity.max_loss_difference) ? short(c.parity.max_loss_difference) : 'not finite',
                          known(c.parity.first_step) ? String(c.parity.first_step) : '-',
                          c.parity.equal_parameters ? 'equal' : 'differ', c.parity.changes_arithmetic.join(', ') || 'must be equal'])));
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
    const add = (name, value, format, unknown = UNKNOWN) => {
      const x = value(a), y = value(b);
      const told = (v) => known(v) ? format(v) : unknown;
      const ratio = known(x) && known(y) && x > 0 ? '× ' + (y / x).toFixed(2) : '';
      rows.push([name, told(x), told(y), ratio]);
    };
    rows.push(['numbers', a.numbers, b.numbers, '']);
    add('last loss', (c) => c.last_loss, (loss) => loss.toPrecision(7), 'not finite');
    add('step', (c) => metric(c, 'step_ms'), ms);
    for (const [key, name] of [...PARTS, ['other_ms', 'the rest']]) add('· ' + name, (c) => stepPart(c, key), ms);
    add('communication overlapped', (c) => metric(c, 'overlap'), (part) => `${Math.round(100 * part)} %`);
    add('tokens/s', (c) => metric(c, 'tokens_per_s'), short);
    for (const [where, title] of [['peak_bytes', 'peak memory'], ['host_peak_bytes', 'on the host']]) {
      if (!a[where] && !b[where]) continue;
      add(title, (c) => c[where] && c[where].total, amount);
      for (const [key, name] of CATEGORIES) {
        if ((a[where] && a[where][key] > 0) || (b[where] && b[where][key] > 0)) add('· ' + name, (c) => c[where] && c[where][key], amount);
      }
    }
    add('sent in a step', (c) => metric(c, 'sent_bytes'), amount);
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
