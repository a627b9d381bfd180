//! A machine like a reader's: a shell with an empty home, in a checkout whose programs are built.
//! It reaches no other machine: `127.0.0.1` of the pages becomes an address of this process, their
//! database and bucket become those of the test servers, and their host with TLS becomes the
//! registry of the page, or a proxy on loopback. Their other registry becomes one of ours, their
//! collector of traces and their `llama-server` stand-ins. Certificates, keys and tokens that the
//! pages have in `/etc/pf` are made for each shell.

use super::page::{Step, root};
use pfr_testkit::collector::{Collector, Manner};
use pfr_testkit::jwt::{Signer, claims, jwks};
use pfr_testkit::tls::Authority;
use pfr_testkit::{llama, postgres, s3};
use pfr_tests::{binary, own_address};
use std::fs::Permissions;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// How long a command may take, or one in the background until it is ready. A debug build on a busy
/// machine is slow.
const LIMIT: Duration = Duration::from_secs(120);
/// What the home directory is called on the pages.
const HOME: &str = "/home/you";
/// The address on the pages.
const LOOPBACK: &str = "127.0.0.1";
/// Registries of other hosts, on the pages.
const OTHER_HOSTS: [&str; 2] = ["http://registry:", "http://machine-a:"];
/// All addresses of this machine, and the options that allow them.
const ANYWHERE: &str = "0.0.0.0:";
const ALLOWED: [&str; 2] = ["--insecure-listen-anywhere", "--tls-cert"];
/// The database and the bucket of the pages.
const DATABASE: &str = "postgres://pf@db/pf";
const BUCKET: &str = "s3://bucket/";
/// The registry of another program, which becomes a registry of the page on this port.
const OTHER_REGISTRY: (&str, u16) = ("oci://ghcr.io/", 5078);
/// A collector of traces, on the pages.
const COLLECTOR: &str = "http://localhost:4318";
/// A registry with a certificate, on the pages: its own, or that of the proxy in the compose file.
const WITH_TLS: [&str; 2] = ["https://registry.example.com:5077", "https://localhost "];
/// One behind a proxy with TLS: a space ends its address, which has no port. And how the pages give
/// the token for it.
pub const BEHIND_TLS: &str = "https://registry.example.com ";
const TOKEN: &str = "PF_TOKEN=…";
/// Files that the pages take for granted, and what they are called here.
const FILES: [(&str, &str); 8] = [
    ("/etc/pf/token", "token"),
    ("/etc/pf/ca.pem", "ca.pem"),
    ("/etc/pf/tls.crt", "tls.crt"),
    ("/etc/pf/tls.key", "tls.key"),
    ("/etc/pf/cluster.jwks", "cluster.jwks"),
    ("/var/run/secrets/pf/token", "account"),
    ("/models/model.gguf", "model.gguf"),
    ("/var/lib/llama/slots", "slots"),
];
/// Programs of other projects that pages run where they are installed. Each is a capability of the
/// machine.
pub const INSTALLED: [&str; 2] = ["caddy", "openssl"];
/// A program that the pages run and that is a stand-in here.
pub const LLAMA: &str = "llama-server";
/// Who the token of a service account is about, on the pages.
const ISSUER: &str = "https://kubernetes.default.svc.cluster.local";
const AUDIENCE: &str = "pf-registry";
const SUBJECT: &str = "system:serviceaccount:agents:runner";

/// A shell that keeps its state from step to step.
pub struct Shell {
    dir: TempDir,
    bash: Child,
    input: ChildStdin,
    codes: Receiver<String>,
    steps: usize,
    code: i32,
    address: String,
    database: Option<String>,
    bucket: Option<(String, s3::Server)>,
    proxy: Option<Proxy>,
    collector: Option<Collector>,
}

/// A proxy with TLS and a token before the registry of the pages.
struct Proxy {
    process: Child,
    url: String,
}

impl Proxy {
    const SECRET: &str = "a-token";

    fn start(registry: &str, pem: PathBuf) -> Self {
        let arguments = [file("tls_proxy.py"), pem, Self::SECRET.into(), registry.into()];
        let mut process = Command::new("python3").args(arguments).stdout(Stdio::piped()).spawn().unwrap();
        let mut port = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut port).unwrap();
        Self { process, url: format!("https://localhost:{}", port.trim()) }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

/// Writes what [`FILES`] names, and the proxy's certificate and key.
fn write_files(etc: &Path, address: &str) {
    std::fs::create_dir(etc).unwrap();
    let authority = Authority::new();
    authority.write(etc.join("ca.pem"));
    authority.certificate(&[address]).write(etc);
    let proxys = authority.certificate(&["localhost"]);
    std::fs::write(etc.join("localhost.pem"), proxys.certificate + &proxys.key).unwrap();
    std::fs::write(etc.join("token"), Proxy::SECRET).unwrap();
    std::fs::set_permissions(etc.join("token"), Permissions::from_mode(0o600)).unwrap();
    let signer = Signer::es256("cluster");
    std::fs::write(etc.join("cluster.jwks"), jwks(&[&signer])).unwrap();
    std::fs::write(etc.join("account"), signer.token(&claims(ISSUER, AUDIENCE, SUBJECT))).unwrap();
    std::fs::write(etc.join("model.gguf"), "a model").unwrap();
    let states = [("empty", llama::File::dense(Vec::new(), 0, 0)), ("full", llama::File::dense(llama::tokens(40), 2, 64))];
    states.iter().for_each(|(name, state)| std::fs::write(etc.join(format!("model.gguf.{name}")), state.bytes()).unwrap());
}

/// The folder in which the path of this process has a program.
pub fn folder_of(program: &str) -> Option<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH")?).find(|folder| folder.join(program).is_file())
}

/// A file beside this one.
fn file(name: &str) -> PathBuf {
    root().join("tests/tests/it/docs").join(name)
}

/// The result of a step.
#[derive(Debug)]
pub struct Outcome {
    pub code: i32,
    pub output: String,
}

impl Shell {
    pub fn new() -> Self {
        let dir = TempDir::with_prefix("docs").unwrap();
        let home = dir.path().join("home");
        let checkout = home.join("pf");
        std::fs::create_dir_all(checkout.join("target")).unwrap();
        std::fs::create_dir(dir.path().join("steps")).unwrap();
        let programs = binary("pf").parent().unwrap().to_owned();
        std::os::unix::fs::symlink(&programs, checkout.join("target/release")).unwrap();
        for entry in std::fs::read_dir(root()).unwrap().flatten() {
            if entry.file_name() != "target" {
                std::os::unix::fs::symlink(entry.path(), checkout.join(entry.file_name())).unwrap();
            }
        }
        let stand_ins = dir.path().join("bin");
        std::fs::create_dir(&stand_ins).unwrap();
        std::os::unix::fs::symlink(file("llama_server.py"), stand_ins.join(LLAMA)).unwrap();
        let folders = ["/usr/local/bin", "/usr/bin", "/bin"].map(PathBuf::from).into_iter();
        let path = std::env::join_paths(folders.chain(INSTALLED.into_iter().filter_map(folder_of)).chain([stand_ins])).unwrap();
        let address = own_address().to_string();
        write_files(&dir.path().join("etc"), &address);
        let mut bash = Command::new("bash")
            .args(["--norc", "--noprofile"])
            .env_clear()
            .env("HOME", &home)
            .env("PATH", path)
            .env("LC_ALL", "C.UTF-8")
            .env("PF_REGISTRY", format!("http://{address}:5077"))
            .env("PF_REGISTRY_LISTEN", format!("{address}:5077"))
            .current_dir(&checkout)
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, codes) = channel();
        let stdout = BufReader::new(bash.stdout.take().unwrap());
        std::thread::spawn(move || stdout.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        let input = bash.stdin.take().unwrap();
        Self { dir, bash, input, codes, steps: 0, code: 0, address, database: None, bucket: None, proxy: None, collector: None }
    }

    /// Puts a directory first on the path, as the first lines of the quick start do.
    pub fn with_programs(mut self) -> Self {
        let step = Step { line: 0, command: "export PATH=\"$PWD/target/release:$PATH\"".into(), shown: Vec::new() };
        self.run(&step).unwrap();
        self
    }

    /// Runs a step. If it ends with `&`, it runs in the background, and this waits until it is
    /// ready.
    pub fn run(&mut self, step: &Step) -> Result<Outcome, String> {
        self.steps += 1;
        let at = |kind: &str, n: usize| self.dir.path().join("steps").join(format!("{n}.{kind}"));
        let (script, out) = (at("sh", self.steps), at("out", self.steps));
        let command = self.put_in(&step.command);
        std::fs::write(&script, format!("{command}\n")).unwrap();
        // The file begins with the exit code of the step before, so that a page can show `echo $?`.
        writeln!(self.input, "(exit {}); . '{}' >'{}' 2>&1 </dev/null; echo $?", self.code, script.display(), out.display()).unwrap();
        let code = self.codes.recv_timeout(LIMIT).map_err(|_| format!("no end after {LIMIT:?}:\n{}", self.output(&out)))?;
        self.code = code.parse().unwrap();
        if let Some(words) = background(&step.command) {
            self.wait(&out, words)?;
        }
        // Programs send their spans before they end.
        if step.command.contains(COLLECTOR) && self.collector.iter().all(|collector| collector.spans().is_empty()) {
            return Err("the collector got no spans".to_owned());
        }
        Ok(Outcome { code: self.code, output: self.output(&out) })
    }

    fn wait(&self, out: &PathBuf, words: &[&str]) -> Result<(), String> {
        let begin = Instant::now();
        loop {
            let output = self.output(out);
            if words.iter().all(|word| output.contains(word)) {
                return Ok(());
            }
            if output.contains("error:") || output.contains("command not found") || begin.elapsed() > LIMIT {
                return Err(format!("it did not say {words:?}:\n{output}"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// A command with this machine's addresses in place of those on the page.
    fn put_in(&mut self, command: &str) -> String {
        let local = |command: String, host: &&str| command.replace(host, &format!("http://{LOOPBACK}:"));
        let mut command = OTHER_HOSTS.iter().fold(command.to_owned(), local);
        if ALLOWED.iter().any(|option| command.contains(option)) {
            command = command.replace(ANYWHERE, &format!("{LOOPBACK}:"));
        }
        command = command.replace(LOOPBACK, &self.address);
        for with_tls in WITH_TLS {
            let space = &with_tls[with_tls.trim_end().len()..];
            command = command.replace(with_tls, &format!("https://{}:5077{space}", self.address));
        }
        let (other, port) = OTHER_REGISTRY;
        command = command.replace(other, &format!("oci://{}:{port}/", self.address));
        let etc = self.dir.path().join("etc");
        command = FILES.iter().fold(command, |command, (shown, name)| command.replace(shown, etc.join(name).to_str().unwrap()));
        if command.contains(DATABASE) {
            command = command.replace(DATABASE, self.database.get_or_insert_with(postgres::database));
        }
        if command.contains(BUCKET) {
            let (bucket, s3) = self.bucket.get_or_insert_with(|| {
                let s3 = s3::Server::shared();
                (format!("s3://{}/", s3.bucket()), s3)
            });
            let exports: String = s3.env().iter().map(|(name, value)| format!("export {name}='{value}'\n")).collect();
            command = format!("{exports}{}", command.replace(BUCKET, bucket));
        }
        if command.contains(COLLECTOR) {
            let collector = self.collector.get_or_insert_with(|| Collector::start(Manner::Take));
            command = command.replace(COLLECTOR, &collector.url);
        }
        if command.contains(BEHIND_TLS) {
            let proxy = self.proxy.get_or_insert_with(|| Proxy::start(&format!("{}:5077", self.address), etc.join("localhost.pem")));
            let command_here =
                command.replace(BEHIND_TLS, &format!("{} ", proxy.url)).replace(TOKEN, &format!("PF_TOKEN={}", Proxy::SECRET));
            command = format!("export SSL_CERT_FILE='{}'\n{command_here}", etc.join("ca.pem").display());
        }
        command
    }

    /// What a step has printed so far, with the page's names for places.
    fn output(&self, out: &PathBuf) -> String {
        let text = String::from_utf8_lossy(&std::fs::read(out).unwrap_or_default()).into_owned();
        let home = self.dir.path().join("home");
        let text = text.replace(home.to_str().unwrap(), HOME).replace(&format!("https://{}:5077", self.address), WITH_TLS[0]);
        let text = text.replace(&self.address, LOOPBACK);
        let text = self.proxy.iter().fold(text, |text, proxy| text.replace(&proxy.url, BEHIND_TLS.trim_end()));
        let text = self.database.iter().fold(text, |text, database| text.replace(database, DATABASE));
        self.bucket.iter().fold(text, |text, (bucket, _)| text.replace(bucket, BUCKET))
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        // Programs in the background are in the shell's process group.
        drop(Command::new("kill").args(["-KILL", "--", &format!("-{}", self.bash.id())]).status());
        drop(self.bash.wait());
    }
}

/// What a command in the background prints when it is ready; none if it is in the foreground.
fn background(command: &str) -> Option<&'static [&'static str]> {
    let code = command.lines().last()?.split("  #").next()?.trim_end();
    if !code.ends_with('&') || code.ends_with("&&") {
        return None;
    }
    Some(match () {
        () if code.contains("pf-kv serve") && command.contains("\"open\"") => &["\"attached\"", "\"opened\""],
        () if code.contains("pf-kv serve") => &["\"attached\""],
        () if code.contains(" serve") => &["listening on"],
        () => &["\n"],
    })
}
