//! `pf-registry domain`: lists domains, shows and sets their quotas, wraps their keys again, on the
//! database.

use super::tool::{on_catalogue, print};
use super::{MORE, Settings, of_key_tool, of_tool};
use crate::Error;
use crate::audit::of_command;
use clap::{Args, Subcommand};
use pfr_client::{ByteSize, human};
use pfr_schema::DomainName;
use pfr_schema::api::{DomainInfo, DomainList, DomainQuota, DomainState, Quota, QuotaLimits};
use pfr_store::Domains;
use serde::Serialize;
use std::str::FromStr;

/// Domains read at a time.
const PAGE: usize = 1000;

/// What to do with domains.
#[derive(Subcommand)]
pub(crate) enum DomainCommand {
    /// Lists the domains.
    #[command(mut_args(of_tool), after_help = MORE)]
    List(List),
    /// Shows the quota of a domain, or sets it.
    #[command(mut_args(of_tool), after_help = EXAMPLES)]
    Quota(SetQuota),
    /// Wraps the keys of encrypted domains with --key-file, or by --key-command. --old-key-file
    /// opens those that it wrapped before. No pack is written. May be repeated.
    #[command(mut_args(of_key_tool), after_help = REWRAP)]
    Rewrap(Rewrap),
}

const REWRAP: &str = "\
Example:
  pf-registry domain rewrap --data DIR --old-key-file old.key --key-file new.key

The other settings of `pf-registry serve` are accepted, too; most matter to a server only.";

const EXAMPLES: &str = "\
Examples:
  pf-registry domain quota acme --data DIR
  pf-registry domain quota acme --data DIR --bytes 500GiB --snapshots 10000
  pf-registry domain quota acme --data DIR --snapshots none

The other settings of `pf-registry serve` are accepted, too; most matter to a server only.";

/// Arguments of `domain list`.
#[derive(Args)]
pub(crate) struct List {
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    settings: Settings,
}

/// Arguments of `domain quota`.
#[derive(Args)]
pub(crate) struct SetQuota {
    /// The domain.
    #[arg(value_name = "NAME")]
    domain: DomainName,
    /// Bytes of stored blobs that it may hold, such as 500GiB, or `none`.
    #[arg(long, value_name = "SIZE")]
    bytes: Option<Limit>,
    /// Stored blobs that it may hold, or `none`.
    #[arg(long, value_name = "N")]
    objects: Option<Limit>,
    /// Snapshots that it may hold, or `none`.
    #[arg(long, value_name = "N")]
    snapshots: Option<Limit>,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    settings: Settings,
}

/// Arguments of `domain rewrap`.
#[derive(Args)]
pub(crate) struct Rewrap {
    /// The domain [default: all].
    #[arg(value_name = "NAME")]
    domain: Option<DomainName>,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    settings: Settings,
}

/// What became of the keys of domains.
#[derive(Serialize)]
struct Rewrapped {
    /// Wrapped by the present key now, in the catalogue and beside the packs.
    domains: Vec<DomainName>,
    /// Not encrypted.
    unencrypted: Vec<DomainName>,
}

/// A limit, or `none`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Limit(Option<u64>);

impl FromStr for Limit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self(None));
        }
        let ByteSize(limit) = text
            .parse::<ByteSize>()
            .map_err(|_| format!("expected a number such as 10000, a size such as 500GiB, or none, found {text:?}"))?;
        if limit > QuotaLimits::MOST {
            return Err(format!("a limit is {} at most, found {text:?}; `none` is no limit", QuotaLimits::MOST));
        }
        Ok(Self(Some(limit)))
    }
}

pub(super) fn run(command: DomainCommand) -> Result<(), Error> {
    match command {
        DomainCommand::List(args) => list(args),
        DomainCommand::Quota(args) => quota(args),
        DomainCommand::Rewrap(args) => rewrap(args),
    }
}

fn list(args: List) -> Result<(), Error> {
    let domains = on_catalogue(&args.settings.load()?, async |catalogue| Ok(DomainList { domains: all(&catalogue).await?, next: None }))?;
    print(&domains, args.json, |list| list.domains.iter().map(line).collect());
    Ok(())
}

/// All domains, also those that are being deleted.
async fn all(catalogue: &Domains) -> Result<Vec<DomainInfo>, Error> {
    let (mut domains, mut after) = (Vec::new(), None);
    loop {
        let page = catalogue.list(after, PAGE).await.map_err(Error::Work)?;
        domains.extend(page.rows);
        after = page.next;
        if after.is_none() {
            return Ok(domains);
        }
    }
}

/// One domain that cannot be rewrapped does not keep the others from it.
fn rewrap(args: Rewrap) -> Result<(), Error> {
    let Rewrap { domain, json, settings } = args;
    let (done, failed) = on_catalogue(&settings.load()?, async |catalogue| {
        let names = match domain {
            Some(name) => vec![name],
            None => {
                let live = all(&catalogue).await?.into_iter().filter(|domain| domain.state == DomainState::Live);
                live.map(|domain| domain.name).collect()
            }
        };
        let (mut done, mut failed) = (Rewrapped { domains: Vec::new(), unencrypted: Vec::new() }, None);
        for name in names {
            let mut entry = of_command("rewrap_domain");
            entry.record.subject = Some(name.to_string());
            match catalogue.audited(entry).rewrap(&name).await {
                Ok(true) => done.domains.push(name),
                Ok(false) => done.unencrypted.push(name),
                Err(error) => {
                    tracing::error!(%error, domain = %name, "the key of a domain could not be wrapped again");
                    failed.get_or_insert(error);
                }
            }
        }
        Ok((done, failed))
    })?;
    print(&done, json, |done| {
        let lines = |words: &str, names: &[DomainName]| names.iter().map(|name| format!("{name}  {words}\n")).collect::<String>();
        lines("rewrapped", &done.domains) + &lines("not encrypted", &done.unencrypted)
    });
    failed.map_or(Ok(()), |error| Err(Error::Work(error)))
}

fn line(domain: &DomainInfo) -> String {
    let state = match domain.state {
        DomainState::Live => "live",
        DomainState::Deleting => "being deleted",
    };
    let encrypted = if domain.encrypted { ", encrypted" } else { "" };
    format!("{}  {state}{encrypted}\n", domain.name)
}

fn quota(args: SetQuota) -> Result<(), Error> {
    let SetQuota { domain, bytes, objects, snapshots, json, settings } = args;
    let quota = on_catalogue(&settings.load()?, async |catalogue| {
        let store = catalogue.open(&domain).await?;
        let metadata = store.metadata();
        let now = metadata.quota().await.map_err(Error::Work)?;
        if bytes.is_none() && objects.is_none() && snapshots.is_none() {
            return Ok(DomainQuota { quota: now });
        }
        let before = now.map(|quota| quota.limits).unwrap_or_default();
        let changed = |given: Option<Limit>, before: Option<u64>| given.map_or(before, |limit| limit.0);
        let limits = QuotaLimits {
            bytes: changed(bytes, before.bytes),
            objects: changed(objects, before.objects),
            snapshots: changed(snapshots, before.snapshots),
        };
        let mut entry = of_command("set_quota");
        (entry.of_registry, entry.record.domain, entry.record.subject) = (false, Some(domain.clone()), Some(domain.to_string()));
        Ok(DomainQuota { quota: metadata.set_quota(limits, Some(entry)).await.map_err(Error::Work)? })
    })?;
    print(&quota, json, |quota| quota.quota.as_ref().map_or_else(|| "no quota\n".to_owned(), lines));
    Ok(())
}

/// A line for each limit.
fn lines(quota: &Quota) -> String {
    let Quota { limits, used_bytes, used_objects, used_snapshots } = quota;
    let line = |what: &str, limit: Option<u64>, used: u64, shown: fn(u64) -> String| {
        limit.map(|limit| format!("{what}  {} of {}\n", shown(used), shown(limit))).unwrap_or_default()
    };
    [
        line("bytes", limits.bytes, *used_bytes, human::bytes),
        line("objects", limits.objects, *used_objects, human::number),
        line("snapshots", limits.snapshots, *used_snapshots, human::number),
    ]
    .concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_a_number_a_size_or_none() {
        for (text, limit) in
            [("none", None), ("0", Some(0)), ("10000", Some(10_000)), ("500GiB", Some(500 << 30)), ("1024PiB", Some(1 << 60))]
        {
            assert_eq!(text.parse(), Ok(Limit(limit)), "{text}");
        }
        for wrong in ["", "None", "-1", "many", "1025PiB"] {
            assert!(wrong.parse::<Limit>().is_err(), "{wrong}");
        }
    }
}
