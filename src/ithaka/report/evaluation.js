// Draws losses by position. `runs` are the models; each has rows { from, to, loss, error } under a box's name.
for (const box of document.querySelectorAll("[data-rows]")) {
  const rowsOf = model => model[box.dataset.rows].filter(row => row.loss != null);
  const label = ({ from, to, loss, error }) => `${from} to ${to}: ${loss.toPrecision(4)}${error ? " ± " + error.toPrecision(3) : ""}`;
  charts.push({ box, live: null, option: (c, narrow) => ({
    ...base(c, narrow), dataZoom: [], legend: { ...base(c, narrow).legend, show: runs.length > 1 },
    tooltip: { ...base(c, narrow).tooltip, trigger: "item", formatter: ({ seriesName, data }) => echarts.format.encodeHTML(`${seriesName} ${data.label}`) },
    xAxis: axis(c, { type: "log", logBase: 2, name: "position (tokens)", min: "dataMin", max: "dataMax", axisLabel: { formatter: n => tokens(Math.round(n)) } }),
    yAxis: axis(c, { type: "value", scale: true }),
    series: runs.map((model, i) => ({
      name: model.name, type: "line", color: RUN_COLOURS[i], symbol: RUN_SYMBOLS[i], symbolSize: 6, lineStyle: { width: 2 },
      // A step from the first position to the last; the first row starts at 1, which is too far left on this axis.
      data: rowsOf(model).flatMap(row => [Math.max(row.from, row.to / 2), row.to].map(at => ({ value: [at, row.loss], label: label(row) }))),
    })),
  }) });
}
