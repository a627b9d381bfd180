//! Clients of container registries that other projects wrote, against the real registry.

mod processfork;
mod skopeo;

use pfr_tests::{Registry, binary, skip};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// A folder in which such programs run: it is their home too, so they share no credentials and no
/// settings with the user of the machine.
struct Desk(TempDir);

/// What a program printed.
#[derive(Debug)]
struct Done {
    ok: bool,
    stdout: String,
    stderr: String,
}

impl Desk {
    fn new() -> Self {
        let desk = Self(TempDir::new().unwrap());
        std::fs::create_dir(desk.path("run")).unwrap();
        desk
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, program: &str, args: &[&str]) -> Command {
        let mut command = Command::new(program);
        command
            .args(args)
            .env_clear()
            .env("HOME", self.0.path())
            .env("XDG_RUNTIME_DIR", self.path("run"))
            .env("TMPDIR", self.0.path())
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .current_dir(self.0.path())
            .stdin(Stdio::null());
        command
    }

    fn run(&self, program: &str, args: &[&str]) -> Done {
        done(&mut self.command(program, args))
    }
}

fn done(command: &mut Command) -> Done {
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Done { ok: output.status.success(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

impl Done {
    #[track_caller]
    fn ok(self) -> String {
        assert!(self.ok, "{self:?}");
        self.stdout
    }

    /// It failed, and said why.
    #[track_caller]
    fn refused(self, reason: &str) {
        assert!(!self.ok && (self.stderr.contains(reason) || self.stdout.contains(reason)), "expected {reason:?}: {self:?}");
    }
}

/// Whether a program runs here.
fn is_here(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
}

/// A new access token.
fn token(registry: &Registry, scope: &str) -> String {
    let data = registry.data().to_str().unwrap();
    let args = ["token", "create", "--data", data, "--label", "client", "--scope", scope];
    let output = Command::new(binary("pf-registry")).args(args).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// The digest that a document or a blob has.
fn sha256(bytes: &[u8]) -> String {
    pfr_schema::Digest::sha256(bytes).to_string()
}

/// An OCI image layout, written here.
struct Layout {
    path: PathBuf,
    listed: Vec<Value>,
}

impl Layout {
    fn new(path: &Path) -> Self {
        std::fs::create_dir_all(path.join("blobs/sha256")).unwrap();
        std::fs::write(path.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
        Self { path: path.to_owned(), listed: Vec::new() }
    }

    /// As a reference of skopeo.
    fn image(&self, name: &str) -> String {
        format!("oci:{}:{name}", self.path.display())
    }

    fn blob(&self, media_type: &str, bytes: &[u8]) -> Value {
        let digest = sha256(bytes);
        std::fs::write(self.path.join("blobs/sha256").join(digest.trim_start_matches("sha256:")), bytes).unwrap();
        json!({"mediaType": media_type, "digest": digest, "size": bytes.len()})
    }

    fn add(&mut self, name: &str, mut descriptor: Value) -> Value {
        let unnamed = descriptor.clone();
        descriptor["annotations"] = json!({"org.opencontainers.image.ref.name": name});
        self.listed.push(descriptor);
        let index = json!({"schemaVersion": 2, "manifests": self.listed});
        std::fs::write(self.path.join("index.json"), index.to_string()).unwrap();
        unnamed
    }

    /// Adds an image of one layer; its descriptor.
    fn put(&mut self, name: &str, architecture: &str, layer: &Value) -> Value {
        let config = json!({
            "architecture": architecture, "os": "linux", "config": {}, "history": [{"created_by": "test"}],
            "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]}
        });
        let config = self.blob("application/vnd.oci.image.config.v1+json", config.to_string().as_bytes());
        let media_type = "application/vnd.oci.image.manifest.v1+json";
        let manifest = json!({"schemaVersion": 2, "mediaType": media_type, "config": config, "layers": [layer]});
        let descriptor = self.blob(media_type, manifest.to_string().as_bytes());
        self.add(name, descriptor)
    }

    /// Adds an index of images.
    fn index(&mut self, name: &str, images: &[(&str, &Value)]) -> Value {
        let platform = |(architecture, image): &(&str, &Value)| {
            let mut listed = (*image).clone();
            listed["platform"] = json!({"architecture": architecture, "os": "linux"});
            listed
        };
        let manifests: Vec<Value> = images.iter().map(platform).collect();
        let media_type = "application/vnd.oci.image.index.v1+json";
        let index = json!({"schemaVersion": 2, "mediaType": media_type, "manifests": manifests});
        let descriptor = self.blob(media_type, index.to_string().as_bytes());
        self.add(name, descriptor)
    }
}

#[test]
fn buildah_commits_pushes_and_pulls_both_kinds_of_manifest() {
    let desk = Desk::new();
    let (root, run) = (desk.path("images"), desk.path("containers"));
    let buildah = |args: &[&str]| {
        let storage = ["--storage-driver", "vfs", "--root", root.to_str().unwrap(), "--runroot", run.to_str().unwrap()];
        desk.run("buildah", &[&storage[..], args].concat())
    };
    if !is_here("buildah") {
        return skip("buildah", "there is no buildah");
    }
    // Without root it may be able to make a container, and not to show the files in it.
    if !buildah(&["from", "--name", "work", "scratch"]).ok || !buildah(&["mount", "work"]).ok {
        return skip("buildah", "buildah may not make images here");
    }
    std::fs::write(desk.path("file"), "content").unwrap();
    buildah(&["copy", "work", desk.path("file").to_str().unwrap(), "/file"]).ok();
    buildah(&["config", "--entrypoint", r#"["/file"]"#, "work"]).ok();
    buildah(&["commit", "--rm", "--quiet", "work", "localhost/made:1"]).ok();
    let registry = Registry::start();
    for format in ["oci", "docker"] {
        let image = format!("{}/team/built:{format}", registry.address());
        let target = format!("docker://{image}");
        buildah(&["push", "--quiet", "--tls-verify=false", "--format", format, "localhost/made:1", &target]).ok();
        let pulled = buildah(&["pull", "--quiet", "--tls-verify=false", &image]).ok();
        let shown = buildah(&["inspect", "--type", "image", "--format", "{{.OCIv1.Config.Entrypoint}}", pulled.trim()]).ok();
        assert_eq!(shown.trim(), "[/file]");
        buildah(&["from", "--name", format, "--pull-never", pulled.trim()]).ok();
        let files = buildah(&["mount", format]).ok();
        assert_eq!(std::fs::read_to_string(Path::new(files.trim()).join("file")).unwrap(), "content");
        buildah(&["rm", format]).ok();
        buildah(&["rmi", "--force", &image]).ok();
    }
}

#[test]
fn oras_pushes_pulls_attaches_lists_and_deletes() {
    let desk = Desk::new();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/oci_clients/oras_client.py");
    let python = |args: &[&str]| {
        let mut command = desk.command("python3", args);
        command.env("PYTHONDONTWRITEBYTECODE", "1");
        if let Some(folder) = std::env::var_os("PF_TEST_ORAS") {
            command.env("PYTHONPATH", folder);
        }
        command
    };
    if !python(&["-c", "import oras.client"]).output().is_ok_and(|output| output.status.success()) {
        return skip("oras", "python3 has no package oras");
    }
    let registry = Registry::start_with(true, &["--require-tokens"], &[]);
    let (writer, reader) = (token(&registry, "team/*:pull,push,delete"), token(&registry, "team/*:pull"));
    done(&mut python(&[script.to_str().unwrap(), registry.address(), &writer, &reader])).ok();
}
