//! Endpoints of capture agents.

use super::read::page;
use super::{Remote, all_pages};
use crate::boxed;
use crate::error::Result;
use pfr_schema::{AgentName, api};
use reqwest::Method;

/// Agents in an answer. A report may have some ten KiB.
const PAGE: usize = 100;

impl Remote {
    /// Reports what an agent has and does. It is tried once, without a time limit, and belongs to
    /// no trace: another report follows soon.
    ///
    /// # Errors
    /// `not_found` from a registry of an older version; `denied`; `too_large` if the registry has
    /// very many agents.
    #[boxed]
    pub async fn report_agent(&self, name: &AgentName, report: &api::AgentReport) -> Result<()> {
        let request = self.with_json(Method::PUT, self.path(&["agents", name.as_str()]), report)?;
        self.send_once(request()).await
    }

    /// Forgets an agent: its last report is deleted. One that still runs is there again after its
    /// next report. After an answer that was lost, `not_found` may be its own effect.
    ///
    /// # Errors
    /// `not_found` if it is not known; `denied`.
    #[boxed]
    pub async fn forget_agent(&self, name: &AgentName) -> Result<()> {
        let url = self.path(&["agents", name.as_str()]);
        self.request(|| self.client.delete(url.clone())).await.map(drop)
    }

    /// Agents that report to the registry, by name: at most `limit`, from the one after `after`.
    ///
    /// # Errors
    /// `not_found` from a registry of an older version; `denied`.
    #[boxed]
    pub async fn agents(&self, after: Option<&str>, limit: usize) -> Result<api::AgentList> {
        self.get(page(self.path(&["agents"]), after, limit)).await
    }

    /// Every agent that reports to the registry, by name.
    ///
    /// # Errors
    /// As [`Self::agents`].
    #[boxed]
    pub async fn all_agents(&self) -> Result<Vec<api::AgentInfo>> {
        all_pages("the registry", usize::MAX, move |after: Option<String>| async move {
            let page = self.agents(after.as_deref(), PAGE).await?;
            Ok((page.agents, page.next))
        })
        .await
    }
}
