//! What is asked of `llama-server` over HTTP. Each request has a limit: a server that was stopped
//! keeps its connections open.

use super::folder::Name;
use super::settings::LlamaServer;
use crate::error::{Error, Result};
use pfr_schema::ErrorCode;
use pfr_schema::engine::CallError;
use pfr_service::Secret;
use reqwest::{Method, RequestBuilder, StatusCode};
use serde_json::{Value, json};
use std::time::Duration;

/// Bytes of an answer; that about slots may have their prompts.
const ANSWER_MAX: usize = 64 << 20;
/// Time to connect, and for the question that a server answers while it computes.
const QUICK: Duration = Duration::from_secs(5);
/// Bytes a second that a server reads at least.
const SLOWEST: u64 = 64 << 20;

/// A client of one server.
#[derive(Debug)]
pub(super) struct Http {
    engine: String,
    url: String,
    client: reqwest::Client,
    key: Option<Secret>,
    timeout: Duration,
}

/// What a server says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Props {
    pub model: String,
    pub build: String,
    pub slots: u32,
    /// Tokens that a slot can have.
    pub context: u64,
}

/// A slot, as the server lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    pub id: u32,
    pub busy: bool,
    /// Tokens in it; not known before its first request.
    pub tokens: Option<u64>,
}

impl Http {
    pub fn new(server: &LlamaServer, timeout: Duration) -> Result<Self> {
        // Fails if a provider is installed already. Any provider will do.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let builder = reqwest::Client::builder().no_proxy().connect_timeout(QUICK).redirect(reqwest::redirect::Policy::none());
        let client = builder.build().map_err(|e| Error::Internal(e.to_string()))?;
        let key = match &server.api_key_file {
            Some(path) => {
                let text =
                    std::fs::read_to_string(path).map_err(Error::io(format!("API key of {:?} in {}", server.name, path.display())))?;
                Some(Secret::new(text.trim()))
            }
            None => None,
        };
        let url = server.url.trim_end_matches('/').to_owned();
        Ok(Self { engine: server.name.clone(), url, client, key, timeout })
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    /// Time that a server gets for work whose length is not known.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    pub async fn props(&self) -> Result<Props> {
        let props = self.ask("props", self.request(Method::GET, "/props"), QUICK).await?;
        let lacks = |what: &str| self.broke(format!("GET /props does not say {what}; a llama-server of one model is expected"));
        let text = |key: &str| props[key].as_str().filter(|text| !text.is_empty()).map(str::to_owned);
        let context = props["default_generation_settings"]["n_ctx"].as_u64();
        Ok(Props {
            model: text("model_path").ok_or_else(|| lacks("\"model_path\""))?,
            build: text("build_info").ok_or_else(|| lacks("\"build_info\""))?,
            slots: props["total_slots"].as_u64().and_then(|n| u32::try_from(n).ok()).ok_or_else(|| lacks("\"total_slots\""))?,
            context: context.ok_or_else(|| lacks("\"default_generation_settings.n_ctx\""))?,
        })
    }

    /// Adapters that are in use: path and scale.
    pub async fn adapters(&self) -> Result<Vec<(String, String)>> {
        let list = self.ask("lora-adapters", self.request(Method::GET, "/lora-adapters"), self.timeout).await?;
        let list = list.as_array().ok_or_else(|| self.broke("GET /lora-adapters is no list".into()))?;
        let used = list.iter().filter(|adapter| adapter["scale"].as_f64() != Some(0.0));
        used.map(|adapter| match (adapter["path"].as_str(), &adapter["scale"]) {
            (Some(path), scale) if scale.is_number() => Ok((path.to_owned(), scale.to_string())),
            _ => Err(self.broke("GET /lora-adapters has an adapter without path or scale".into())),
        })
        .collect()
    }

    /// The slots; `None` if the server does not tell (`--no-slots`).
    pub async fn slots(&self) -> Result<Option<Vec<Slot>>> {
        let slots = match self.ask("slots", self.request(Method::GET, "/slots"), self.timeout).await {
            Err(Error::Refused { .. }) => return Ok(None),
            other => other?,
        };
        let slot = |slot: &Value| {
            let id = u32::try_from(slot["id"].as_u64()?).ok()?;
            Some(Slot { id, busy: slot["is_processing"].as_bool()?, tokens: slot["n_prompt_tokens"].as_u64() })
        };
        let slots: Option<Vec<Slot>> = slots.as_array().map(|slots| slots.iter().map(slot).collect()).unwrap_or_default();
        slots.map(Some).ok_or_else(|| self.broke("GET /slots is no list of slots".into()))
    }

    /// Saves a slot under a name, and returns the bytes that the server says it wrote. The request
    /// may take as long as the file grows.
    pub async fn save(&self, slot: u32, name: &Name) -> Result<u64> {
        let request = self.request(Method::POST, &format!("/slots/{slot}?action=save")).json(&json!({"filename": name.as_str()}));
        let mut asked = Box::pin(self.ask("save", request, Duration::MAX));
        let mut bytes = name.bytes();
        let answer = loop {
            match tokio::time::timeout(self.timeout, &mut asked).await {
                Ok(answer) => break answer?,
                Err(_) if name.bytes() > bytes => bytes = name.bytes(),
                Err(_) => return Err(self.late("save", self.timeout)),
            }
        };
        answer["n_written"].as_u64().ok_or_else(|| self.broke("its answer to save does not say n_written".into()))
    }

    /// Restores a slot from a file of `bytes` bytes.
    pub async fn restore(&self, slot: u32, name: &Name, bytes: u64) -> Result<()> {
        let limit = self.timeout.saturating_add(Duration::from_secs(bytes / SLOWEST));
        let request = self.request(Method::POST, &format!("/slots/{slot}?action=restore")).json(&json!({"filename": name.as_str()}));
        let answer = self.ask("restore", request, limit).await?;
        match answer["n_read"].as_u64() {
            Some(read) if read != bytes => Err(self.broke(format!("it read {read} of {bytes} bytes"))),
            _ => Ok(()),
        }
    }

    /// Lets a slot compute one token.
    pub async fn compute(&self, slot: u32, token: u32) -> Result<()> {
        let body = json!({"prompt": [token], "n_predict": 1, "id_slot": slot, "cache_prompt": true, "temperature": 0});
        self.ask("completion", self.request(Method::POST, "/completion").json(&body), self.timeout).await.map(drop)
    }

    /// Empties a slot.
    pub async fn erase(&self, slot: u32) -> Result<()> {
        let request = self.request(Method::POST, &format!("/slots/{slot}?action=erase")).json(&json!({}));
        self.ask("erase", request, self.timeout).await.map(drop)
    }

    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let request = self.client.request(method, format!("{}{path}", self.url));
        match &self.key {
            Some(key) => request.bearer_auth(key.expose()),
            None => request,
        }
    }

    async fn ask(&self, what: &'static str, request: RequestBuilder, limit: Duration) -> Result<Value> {
        let exchange = async {
            let mut response = request.send().await.map_err(|e| self.lost(&e))?;
            let status = response.status();
            let mut body = Vec::new();
            while let Some(piece) = response.chunk().await.map_err(|e| self.lost(&e))? {
                body.extend_from_slice(&piece);
                if body.len() > ANSWER_MAX {
                    return Err(self.broke(format!("its answer to {what} has more than {ANSWER_MAX} bytes")));
                }
            }
            Ok::<_, Error>((status, body))
        };
        let (status, body) = match tokio::time::timeout(limit, exchange).await {
            Ok(answer) => answer?,
            Err(_) => return Err(self.late(what, limit)),
        };
        let answer = serde_json::from_slice::<Value>(&body);
        if status == StatusCode::OK {
            return answer.map_err(|e| self.broke(format!("its answer to {what} is no JSON: {e}")));
        }
        let answer = answer.unwrap_or_default();
        let message: String = answer["error"]["message"].as_str().unwrap_or("no reason").chars().take(300).collect();
        let code = match status {
            StatusCode::UNAUTHORIZED => ErrorCode::Unauthorized,
            StatusCode::BAD_REQUEST | StatusCode::NOT_FOUND => ErrorCode::InvalidRequest,
            StatusCode::SERVICE_UNAVAILABLE => ErrorCode::EngineBusy,
            _ => ErrorCode::EngineRefused,
        };
        let failure = CallError { code, detail: format!("{message} (HTTP {})", status.as_u16()) };
        Err(Error::Refused { engine: self.engine.clone(), call: what, failure })
    }

    fn lost(&self, error: &reqwest::Error) -> Error {
        let mut reason = error.to_string();
        let mut cause = std::error::Error::source(error);
        while let Some(deeper) = cause {
            reason = deeper.to_string();
            cause = deeper.source();
        }
        Error::Lost { engine: self.engine.clone(), reason: format!("llama-server at {}: {reason}", self.url) }
    }

    fn late(&self, what: &str, limit: Duration) -> Error {
        let reason = format!("llama-server at {} did not answer {what} within {} s", self.url, limit.as_secs_f64());
        Error::Lost { engine: self.engine.clone(), reason }
    }

    fn broke(&self, reason: String) -> Error {
        Error::Protocol { engine: self.engine.clone(), reason: format!("llama-server at {}: {reason}", self.url) }
    }
}
