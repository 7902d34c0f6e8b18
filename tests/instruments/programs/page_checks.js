// What is wrong with the page as it is shown now, a sentence each.
(() => {
  const wrong = []
  const width = document.documentElement.clientWidth
  if (document.documentElement.scrollWidth > width)
    wrong.push(`the page is ${document.documentElement.scrollWidth} px wide in a window of ${width} px`)

  const parts = colour => {
    const [red, green, blue, alpha = 1] = colour.match(/[\d.]+/g).map(Number)
    return [red, green, blue, alpha]
  }
  const over = (top, opacity, bottom) => bottom.map((value, at) => value + (top[at] - value) * top[3] * opacity)
  const luminance = colour => {
    const [red, green, blue] = colour.map(value => value / 255)
      .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
  }
  const contrast = (one, other) => {
    const [brighter, darker] = [luminance(one), luminance(other)].sort((a, b) => b - a)
    return (brighter + 0.05) / (darker + 0.05)
  }
  const paintOf = element => {
    const style = getComputedStyle(element)
    // a line may pass behind a text, which has a rim in the colour of the ground then
    const isShape = element instanceof SVGGeometryElement && !['line', 'polyline'].includes(element.tagName)
    if (element instanceof SVGElement && !isShape) return null
    const paint = isShape ? style.fill : style.backgroundColor
    return paint.startsWith('rgb') && parts(paint)[3] > 0 ? [parts(paint), Number(style.opacity)] : null
  }
  // the ground behind a point of an element: every fill below it, from the bottom up; null if something lies above it
  const ground = (element, x, y) => {
    const all = document.elementsFromPoint(x, y)
    const at = all.indexOf(element)
    if (at < 0 || all.slice(0, at).some(above => !element.contains(above) && paintOf(above))) return null
    let colour = matchMedia('(prefers-color-scheme: dark)').matches ? [18, 18, 18] : [255, 255, 255]
    for (const paint of all.slice(at).reverse().map(paintOf)) if (paint) colour = over(paint[0], paint[1], colour)
    return colour
  }
  const judge = (element, text, box, colour, size, named) => {
    const told = `${JSON.stringify(text.slice(0, 40))}${named}`
    if (size < 12) wrong.push(`${told} has ${size.toFixed(1)} px`)
    const svg = element.closest('svg')
    const frame = svg ? svg.getBoundingClientRect() : {left: 0, right: width, top: 0, bottom: Infinity}
    if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1)
      wrong.push(`${told} is cut: ${box.left.toFixed(0)} to ${box.right.toFixed(0)} of ${frame.left.toFixed(0)} to ${frame.right.toFixed(0)}`)
    for (const share of [0.1, 0.5, 0.9]) {
      const behind = ground(element, box.left + share * box.width, (box.top + box.bottom) / 2)
      if (behind === null) return wrong.push(`${told} is covered`)
      const found = contrast(over(parts(colour), 1, behind), behind)
      if (found < 4.5) return wrong.push(`${told} has a contrast of ${found.toFixed(2)}`)
    }
  }

  let judged = 0
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement
    const text = texts.currentNode.data.trim()
    if (!text || element.closest('style, title') || !element.checkVisibility()) continue
    const style = getComputedStyle(element)
    judged += 1
    if (element instanceof SVGElement) {
      const scale = element.getScreenCTM().a
      judge(element, text, element.getBoundingClientRect(), style.fill, scale * parseFloat(style.fontSize), '')
      continue
    }
    const range = document.createRange()
    range.selectNodeContents(texts.currentNode)
    for (const box of range.getClientRects())
      if (box.width > 0) judge(element, text, box, style.color, parseFloat(style.fontSize), '')
  }
  for (const cell of document.querySelectorAll('td')) {
    const before = getComputedStyle(cell, '::before')
    if (before.content === 'none' || !cell.checkVisibility()) continue
    const box = cell.getBoundingClientRect()
    const behind = ground(cell, box.left + 2, (box.top + box.bottom) / 2)
    const found = contrast(parts(before.color).slice(0, 3), behind)
    if (found < 4.5) wrong.push(`the name beside ${JSON.stringify(cell.innerText)} has a contrast of ${found.toFixed(2)}`)
    if (parseFloat(before.fontSize) < 12) wrong.push(`the name beside ${JSON.stringify(cell.innerText)} is small`)
  }

  // labels of a picture do not run into each other
  for (const svg of document.querySelectorAll('svg')) {
    const labels = [...svg.querySelectorAll('text')].filter(text => text.checkVisibility())
      .map(text => [text.textContent, text.getBoundingClientRect()])
    labels.forEach(([text, box], at) => labels.slice(at + 1).forEach(([other, beside]) => {
      const across = Math.min(box.right, beside.right) - Math.max(box.left, beside.left)
      const down = Math.min(box.bottom, beside.bottom) - Math.max(box.top, beside.top)
      if (across > 1 && down > 3) wrong.push(`${JSON.stringify(text)} and ${JSON.stringify(other)} overlap`)
    }))
  }
  return {judged, pictures: [...document.querySelectorAll('svg')].filter(svg => svg.checkVisibility()).length, wrong}
})()
