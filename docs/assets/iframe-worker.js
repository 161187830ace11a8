// A browser starts no web worker from the file system, so there the search of this site runs in a hidden frame instead.
// The frame shares the origin of the page, and both sides see the few members of a worker that the search uses.
// As with a worker, a message is a copy and arrives later: otherwise an answer during a key press empties the search field.
if (location.protocol === "file:") {
  const later = (data, receive) => {
    const copy = structuredClone(data);
    setTimeout(() => receive(copy));
  };
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.documentElement.append(this.frame);
      const inner = this.frame.contentWindow;
      this.ready = new Promise((resolve, reject) => {
        const script = inner.document.createElement("script");
        inner.postMessage = (data) => later(data, (copy) => this.receive("message", copy));
        script.onload = resolve;
        script.onerror = reject;
        script.src = url;
        inner.document.head.append(script);
      });
      this.ready.catch((reason) => this.receive("error", reason));
    }
    receive(type, data) {
      const event = new MessageEvent(type, { data });
      this[`on${type}`]?.(event);
      this.dispatchEvent(event);
    }
    postMessage(data) {
      const inner = this.frame.contentWindow;
      this.ready.then(() => later(data, (copy) => inner.dispatchEvent(new inner.MessageEvent("message", { data: copy }))));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
