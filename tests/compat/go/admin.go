package main

import (
	"context"

	"github.com/apache/rocketmq-client-go/v2/admin"
	"github.com/apache/rocketmq-client-go/v2/primitive"
)

// administer opens an admin client for one call: it keeps every route that it has ever seen.
func administer[R any](h *house, act func(admin.Admin) (R, error)) (R, error) {
	made, err := admin.NewAdmin(
		admin.WithResolver(primitive.NewPassthroughResolver(h.nameServers)),
	)
	if err != nil {
		var none R
		return none, err
	}
	defer made.Close()
	return act(made)
}

func createTopic(h *house, a struct {
	Topic, Address string
	Queues         int
}) (any, error) {
	return administer(h, func(by admin.Admin) (any, error) {
		return nil, by.CreateTopic(
			context.Background(),
			admin.WithTopicCreate(a.Topic),
			admin.WithBrokerAddrCreate(a.Address),
			admin.WithReadQueueNums(a.Queues),
			admin.WithWriteQueueNums(a.Queues),
		)
	})
}

func deleteTopic(h *house, a struct{ Topic string }) (any, error) {
	return administer(h, func(by admin.Admin) (any, error) {
		return nil, by.DeleteTopic(context.Background(), admin.WithTopicDelete(a.Topic))
	})
}

func listTopics(h *house, _ struct{}) (any, error) {
	return administer(h, func(by admin.Admin) (any, error) {
		list, err := by.FetchAllTopicList(context.Background())
		if err != nil {
			return nil, err
		}
		return list.TopicList, nil
	})
}

// listQueues answers with the queues that a producer would choose from.
func listQueues(h *house, a struct{ Topic string }) (any, error) {
	return administer(h, func(by admin.Admin) (any, error) {
		return by.FetchPublishMessageQueues(context.Background(), a.Topic)
	})
}

func listGroups(h *house, a struct{ Address string }) (any, error) {
	return administer(h, func(by admin.Admin) (any, error) {
		groups, err := by.GetAllSubscriptionGroup(context.Background(), a.Address, patience)
		if err != nil {
			return nil, err
		}
		names := make(map[string]bool, len(groups.SubscriptionGroupTable))
		for name, group := range groups.SubscriptionGroupTable {
			names[name] = group.ConsumeEnable
		}
		return names, nil
	})
}
