// Node: timers, a worker thread, an http server with a keep-alive client, fs, a child process and crypto's thread pool.
const fs = require('fs');
const http = require('http');
const crypto = require('crypto');
const { spawn } = require('child_process');
const { Worker, isMainThread, parentPort } = require('worker_threads');

if (!isMainThread) {
  parentPort.on('message', (n) => parentPort.postMessage(n * n));
} else {
  const say = (...words) => fs.writeSync(1, words.join(' ') + '\n');
  const assert = require('assert');
  const once = (emitter, event) => new Promise((resolve) => emitter.once(event, resolve));
  const worker = new Worker(__filename);
  const agent = new http.Agent({ keepAlive: true, maxSockets: 1 });
  const child = spawn('cat');
  let ticks = 0;
  const sockets = new Set();
  setInterval(() => ticks++, 10);
  const server = http.createServer((request, response) => {
    sockets.add(request.socket);
    response.end(request.url.slice(1));
  });
  server.keepAliveTimeout = 600000;
  const get = (n) => new Promise((resolve, reject) => {
    http.get({ port: server.address().port, host: '127.0.0.1', path: `/${n}`, agent }, (response) => {
      let body = '';
      response.on('data', (part) => { body += part; });
      response.on('end', () => resolve(body));
    }).on('error', reject);
  });
  server.listen(0, '127.0.0.1', async () => {
    say('ready');
    for (let n = 1; !fs.existsSync('/gate/end'); n++) {
      const before = ticks;
      worker.postMessage(n);
      assert.strictEqual(await once(worker, 'message'), n * n);
      assert.strictEqual(await get(n), String(n));
      assert.strictEqual(sockets.size, 1, 'the keep-alive connection was replaced');
      child.stdin.write(`${n}\n`);
      assert.strictEqual(String(await once(child.stdout, 'data')), `${n}\n`);
      const key = await new Promise((resolve) => crypto.pbkdf2('a', 'b', 100, 8, 'sha256', (e, k) => resolve(k)));
      assert.strictEqual(key.length, 8);
      await fs.promises.writeFile('/tmp/node', String(n));
      assert.strictEqual(await fs.promises.readFile('/tmp/node', 'utf8'), String(n));
      await new Promise((resolve) => setTimeout(resolve, 100));
      for (let i = 0; i < 100 && ticks === before; i++) await new Promise((resolve) => setTimeout(resolve, 100));
      assert(ticks > before, 'timers stand still');
      say('ok', n);
    }
    say('done');
    process.exit(0);
  });
}
