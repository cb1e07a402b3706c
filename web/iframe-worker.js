// A browser starts no worker from disk. There the search, which is the theme's worker, runs in a hidden frame. As between
// threads, it receives copies of messages, because it changes them, and the page would lose what was typed.
if (location.protocol == "file:")
  window.Worker = class {
    constructor(url) {
      this.frame = document.body.appendChild(document.createElement("iframe"));
      this.frame.hidden = true;
      const inside = (this.inside = this.frame.contentWindow);
      addEventListener("message", (event) => event.source == inside && this.onmessage?.(event));
      const answer = 'self.postMessage = (data) => parent.postMessage(data, "*")';
      inside.document.write(`<script>${answer}</script><script src="${url}"></script>`);
      inside.document.close();
      this.ready = new Promise((resolve) => (inside.onload = resolve));
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) })));
    }
    terminate() {
      this.frame.remove();
    }
  };
