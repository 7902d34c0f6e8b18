// Links to the other versions of this site, which are in the folders beside this one. A page that is opened from the disk may not
// fetch a list, but it may run a script: versions.js, which `make docs` writes beside the folders.
const root = new URL(JSON.parse(document.getElementById("__config").textContent).base + "/", location)
const list = document.createElement("script")
list.src = new URL("../versions.js", root)
list.onload = () => {
  const others = window.siteVersions.filter((version) => !root.pathname.endsWith(`/${version}/`))
  if (others.length === 0) return
  const items = others.map((version) => {
    const link = Object.assign(document.createElement("a"), {
      className: "md-version__link",
      href: new URL(`../${version}/index.html`, root),
      textContent: version,
    })
    const item = Object.assign(document.createElement("li"), { className: "md-version__item" })
    item.append(link)
    return item
  })
  const choice = Object.assign(document.createElement("ul"), { className: "md-version__list" })
  choice.append(...items)
  const button = Object.assign(document.createElement("button"), { className: "md-version__current", textContent: "other versions" })
  const box = Object.assign(document.createElement("div"), { className: "md-version" })
  box.append(button, choice)
  document.querySelector(".md-header__topic").append(box)
}
document.head.append(list)
