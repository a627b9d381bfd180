//! A server with the slot interface of `llama-server`, over real files. It computes nothing: slots
//! hold files that were made, or restored.

use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use parking_lot::Mutex;
use pfr_agent::llama::LlamaServer;
use pfr_schema::Limits;
use pfr_schema::llama::{Bytes, parse};
use pfr_testkit::llama::File;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// What goes wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    #[default]
    None,
    /// Saves and restores are not answered, and saves come late.
    Hangs,
    /// The process ends in the middle of a save.
    Dies,
    /// A saved file lacks its last bytes: the server did not check that the disk took them.
    Short,
    /// Saves fail, as on a full disk.
    Fails,
    /// Files are written elsewhere.
    Elsewhere,
    /// A request uses a slot right after it was restored.
    Used,
    /// The server starts anew with another model while it saves.
    Restarts,
}

/// The server.
#[derive(Clone)]
pub struct Server {
    pub url: String,
    pub state: Arc<Mutex<Inner>>,
}

pub struct Inner {
    pub folder: PathBuf,
    pub model: PathBuf,
    pub build: String,
    /// Tokens of a slot.
    pub context: u64,
    /// Adapters, each with its scale.
    pub adapters: Vec<(PathBuf, f64)>,
    pub slots: Vec<Vec<u8>>,
    pub busy: Option<u32>,
    pub fault: Fault,
    /// The form of the cache; a file with another one is refused.
    pub form: Option<String>,
    /// A file of that form, for a slot that computes.
    pub computed: Vec<u8>,
    /// Files that were restored, as they were read.
    pub restored: Vec<Vec<u8>>,
}

impl Server {
    /// A server with `slots` empty slots.
    pub async fn start(folder: &std::path::Path, model: &std::path::Path, slots: usize) -> Self {
        let empty = File::dense(Vec::new(), 0, 0).bytes();
        let inner = Inner {
            folder: folder.into(),
            model: model.into(),
            build: "b11434-test".into(),
            context: 4096,
            adapters: Vec::new(),
            slots: vec![empty; slots],
            busy: None,
            fault: Fault::None,
            form: None,
            computed: Vec::new(),
            restored: Vec::new(),
        };
        let state = Arc::new(Mutex::new(inner));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let app = Router::new()
            .route("/props", get(props))
            .route("/lora-adapters", get(adapters))
            .route("/slots", get(slots_of))
            .route("/slots/{id}", post(act))
            .route("/completion", post(complete))
            .with_state(Arc::clone(&state));
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { url, state }
    }

    /// Its settings in an agent.
    pub fn settings(&self, name: &str) -> LlamaServer {
        let slot_save_path = self.state.lock().folder.clone();
        LlamaServer { name: name.into(), url: self.url.clone(), slot_save_path, model: None, api_key_file: None }
    }

    /// Puts a state into a slot. The cache then has that form.
    pub fn put(&self, slot: u32, file: &File) {
        let bytes = File { slot, ..file.clone() }.bytes();
        let mut inner = self.state.lock();
        inner.form = Some(form(&bytes));
        inner.slots[slot as usize] = bytes;
    }

    /// The server has a cache of this form.
    pub fn accept(&self, file: &File) {
        let bytes = file.bytes();
        let mut inner = self.state.lock();
        (inner.form, inner.computed) = (Some(form(&bytes)), bytes);
    }

    pub fn fault(&self, fault: Fault) {
        self.state.lock().fault = fault;
    }

    /// Names of the files in its folder.
    pub fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.state.lock().folder).unwrap();
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
    }
}

fn form(bytes: &[u8]) -> String {
    parse(&mut Bytes(bytes), &Limits::default()).unwrap().form()
}

/// Some, if the file is one that the agent does not know.
fn tokens(bytes: &[u8]) -> usize {
    parse(&mut Bytes(bytes), &Limits::default()).map_or(1, |state| state.tokens.len())
}

async fn props(State(state): State<Arc<Mutex<Inner>>>) -> Json<Value> {
    let inner = state.lock();
    let Inner { model, build, context, slots, .. } = &*inner;
    let settings = json!({"n_ctx": context});
    Json(json!({"model_path": model, "build_info": build, "total_slots": slots.len(), "default_generation_settings": settings}))
}

async fn adapters(State(state): State<Arc<Mutex<Inner>>>) -> Json<Value> {
    let inner = state.lock();
    let adapter = |(id, (path, scale)): (usize, &(PathBuf, f64))| json!({"id": id, "path": path, "scale": scale});
    Json(inner.adapters.iter().enumerate().map(adapter).collect())
}

async fn slots_of(State(state): State<Arc<Mutex<Inner>>>) -> Json<Value> {
    let inner = state.lock();
    let slot = |(id, bytes): (usize, &Vec<u8>)| json!({"id": id, "n_ctx": 4096, "is_processing": inner.busy == Some(id as u32), "n_prompt_tokens": tokens(bytes)});
    Json(inner.slots.iter().enumerate().map(slot).collect())
}

type Answer = (StatusCode, Json<Value>);

fn error(status: StatusCode, message: &str) -> Answer {
    (status, Json(json!({"error": {"code": status.as_u16(), "message": message, "type": "invalid_request_error"}})))
}

async fn complete(State(state): State<Arc<Mutex<Inner>>>, body: String) -> Json<Value> {
    let body: Value = serde_json::from_str(&body).unwrap();
    let mut inner = state.lock();
    let (slot, computed) = (body["id_slot"].as_u64().unwrap() as usize, inner.computed.clone());
    inner.slots[slot] = computed;
    Json(json!({"content": "x"}))
}

async fn act(
    State(state): State<Arc<Mutex<Inner>>>,
    Path(id): Path<usize>,
    Query(query): Query<HashMap<String, String>>,
    body: String,
) -> Answer {
    let (fault, count, folder) = {
        let inner = state.lock();
        (inner.fault, inner.slots.len(), inner.folder.clone())
    };
    if id >= count {
        return error(StatusCode::BAD_REQUEST, "Invalid slot ID");
    }
    let body: Value = serde_json::from_str(&body).unwrap();
    let path = body["filename"].as_str().map(|name| folder.join(name));
    match query["action"].as_str() {
        "erase" => {
            state.lock().slots[id] = File::dense(Vec::new(), 0, 0).bytes();
            (StatusCode::OK, Json(json!({"id_slot": id, "n_erased": 1})))
        }
        "save" => save(&state, id, &path.unwrap(), fault).await,
        "restore" => restore(&state, id, &path.unwrap(), fault).await,
        other => error(StatusCode::BAD_REQUEST, other),
    }
}

async fn save(state: &Arc<Mutex<Inner>>, id: usize, path: &std::path::Path, fault: Fault) -> Answer {
    let bytes = state.lock().slots[id].clone();
    let written = match fault {
        Fault::Hangs => {
            // As a stopped process: it goes on when the request is long gone.
            let (path, bytes) = (path.to_owned(), bytes.clone());
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(600)).await;
                std::fs::write(path, bytes).unwrap();
            });
            return std::future::pending().await;
        }
        Fault::Dies => {
            std::fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
            // Ends the connection without an answer.
            panic!("the server died");
        }
        Fault::Fails => {
            std::fs::write(path, &bytes[..100]).unwrap();
            return error(StatusCode::INTERNAL_SERVER_ERROR, "Unable to save slot");
        }
        Fault::Short => std::fs::write(path, &bytes[..bytes.len() - 10]),
        Fault::Elsewhere => std::fs::write(path.with_file_name("../elsewhere.bin"), &bytes),
        Fault::Restarts => {
            let other = path.with_file_name("../other.gguf");
            std::fs::write(&other, "another model").unwrap();
            state.lock().model = other;
            std::fs::write(path, &bytes)
        }
        Fault::None | Fault::Used => std::fs::write(path, &bytes),
    };
    if written.is_err() {
        // As on a full disk.
        return error(StatusCode::INTERNAL_SERVER_ERROR, "Unable to save slot");
    }
    (StatusCode::OK, Json(json!({"id_slot": id, "n_saved": tokens(&bytes), "n_written": bytes.len()})))
}

async fn restore(state: &Arc<Mutex<Inner>>, id: usize, path: &std::path::Path, fault: Fault) -> Answer {
    if fault == Fault::Hangs {
        return std::future::pending().await;
    }
    let bytes = std::fs::read(path).unwrap();
    let mut inner = state.lock();
    inner.restored.push(bytes.clone());
    if inner.form.as_ref().is_some_and(|own| *own != form(&bytes)) {
        inner.slots[id] = File::dense(Vec::new(), 0, 0).bytes();
        return error(StatusCode::BAD_REQUEST, "Unable to restore slot, no available space in KV cache or invalid slot save file");
    }
    let read = bytes.len();
    inner.slots[id] = in_slot(bytes, id as u32);
    if fault == Fault::Used {
        let last = inner.slots[id].len() - 1;
        inner.slots[id][last] ^= 1;
    }
    (StatusCode::OK, Json(json!({"id_slot": id, "n_restored": tokens(&inner.slots[id]), "n_read": read})))
}

/// The same state as it is saved from another slot: cells of a dense cache of one stream name it.
fn in_slot(mut bytes: Vec<u8>, slot: u32) -> Vec<u8> {
    let state = parse(&mut Bytes(&bytes), &Limits::default()).unwrap();
    let [section] = &state.sections[..] else { return bytes };
    if section.streams == 1 && section.extra.is_empty() {
        let cells = 12 + 4 * (state.tokens.len() + 4) + 8;
        for cell in 0..section.positions.len() {
            let at = cells + cell * 12 + 8;
            bytes[at..at + 4].copy_from_slice(&slot.to_le_bytes());
        }
    }
    bytes
}
