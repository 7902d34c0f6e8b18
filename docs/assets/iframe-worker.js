// Browsers start no worker for a page that is opened from the disk. There the search runs in a hidden frame instead.
class IFrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.waiting = [];
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    this.frame.onload = () => {
      this.frame.contentWindow.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = true; // the script has run by now
      this.waiting.splice(0).forEach((data) => this.deliver(data));
    };
    document.body.append(this.frame);
    this.frame.contentDocument.open();
    this.frame.contentDocument.write(`<script src="${new URL(url, document.baseURI)}"></script>`);
    this.frame.contentDocument.close();
  }

  postMessage(data) {
    if (this.ready) this.deliver(data);
    else this.waiting.push(data);
  }

  deliver(data) {
    this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
  }

  terminate() {
    this.frame.remove();
  }
}

if (location.protocol === "file:") window.Worker = window.IFrameWorker = IFrameWorker;
